"""What command lines share: arguments, options of methods, output, and the evaluators."""
