"""Words in prompts: adjectives and nouns for keys, and made-up words."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

from rope_eval.data.text import library_words, rarer_words


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words("""
able acid aged airy alert amber ample ancient angry arctic artful ashen awake awkward bad
balmy bare basic bent big bitter black bland blind blue blunt bold brave brief bright brisk
brittle broad broken brown busy calm careful careless cheap cheerful chilly chubby civil
clean clear clever close cloudy clumsy coarse cold common cool costly cosy crisp cruel
curious curly curved daily damp dark dear decent deep dense dim dirty distant double dry dull
dusty eager early easy elastic elegant empty equal exact extra faded faint fair faithful
false famous fancy fast fat fatal feeble fertile few fierce final fine firm fit flat fluffy
foggy fond foolish fragile frail free fresh friendly frosty full funny fuzzy gentle giant
glad gloomy golden good grand grave gray great greedy green grim gross half handy happy hard
harsh hasty hazy healthy heavy hidden high hollow holy honest hot huge humble hungry icy ideal
idle jolly juicy keen kind large late lazy lean light little lively local lonely long loose
loud loving low loyal lucky mad mellow merry mild misty modern modest moist mute naive narrow
neat new nice noble noisy normal odd old open oval pale patient plain polite poor proud pure
quick quiet rapid rare raw ready red rich rigid ripe robust rosy rough round royal rude rural
rusty sad safe salty scarce secret serene severe shaggy shallow sharp shiny short shy silent
silly silver simple sleepy slim slow small smart smooth soft solid sour spicy stable steep
stern stiff still strange strict strong sturdy subtle sudden sunny sweet swift tall tame
tasty tender thick thin tidy tiny tired tough tranquil true ugly unique upper urban useful
vague vain vast vivid warm weak weary wet white whole wide wild wise witty wooden yellow young
""")
NOUNS = _words("""
acorn actor alarm album alley anchor ankle answer apple apron arch arena arm arrow artist
atlas attic aunt author autumn badge bakery balcony ball bamboo banjo banner barn barrel
basket bath bay beach beacon bead beak bean bear beard beaver bed bee beetle bell belt bench
berry bird biscuit blanket blossom boat bone book boot border bottle boulder bowl box bracket
branch bread breeze brick bridge broom brother brush bucket buffalo bulb bundle bush button
cabin cable cactus cake camel camera camp canal candle canoe canvas captain card carpet carrot
cart castle cat cave ceiling cellar chain chair chalk cheese cherry chest chimney church
circle city cliff clock cloth cloud clover coach coal coast coat coffee coin collar comet
compass cook copper coral cord cottage cotton cousin cow crab cradle crane crayon creek crow
crowd crown crystal cup curtain cushion daisy dance dawn deer desert desk diamond dinner dish
doctor dog doll dolphin donkey door dove dragon drawer dream dress drum duck dust eagle ear
earth echo egg elbow engine falcon family farm farmer feather fence fern ferry field finger
fire fish flag flame flock floor flour flower flute fog forest fork fountain fox frame friend
frog fruit garden garlic gate ghost giraffe glass glove goat gold goose grain grape grass
guitar hammer hand harbor harp hat hawk hay heart hedge hen hill hive honey hook horn horse
hotel house iceberg ink insect iron island ivory ivy jacket jar jewel judge juice jungle
kettle key king kitchen kite kitten knee knife knot lace ladder lake lamp lantern leaf lemon
letter library lion lizard lock log lunch magnet map maple market mask meadow melon metal
milk mill mirror moon moss moth mother motor mountain mouse mud mug museum music nail napkin
neck needle nest net noodle nose notebook nurse oak oar ocean olive onion orange orchard otter
oven owl ox oyster paddle page paint palace palm panda paper parade parent park parrot peach
peacock pear pearl pebble pencil pepper piano picture pie pigeon pillow pilot pine pipe planet
plate plum pocket poem poet pond pony porch potato prince puddle pumpkin puppet queen quilt
rabbit raft rail rain raven reed ribbon rice ring river road robin rocket roof room root rope
rose sail salad salt sand scarf school sea seed shadow sheep shelf shell ship shirt shoe shop
shore sister skirt sky sled smoke snail snake snow soap sock sofa soil song soup spade spider
spoon spring squirrel stair star station statue stick stone storm stove straw stream street
sugar summer sun swan table tailor tea teacher tent thread throat thumb thunder ticket tiger
toast tomato tongue tooth torch tower town toy train tray tree truck trumpet tulip tunnel
turtle twig uncle valley vase velvet village vine violin voice wagon wall walnut watch water
wave wax well whale wheat wheel whistle willow wind window wing winter wolf wool worm yard zebra
""")


@cache
def pairs() -> tuple[str, ...]:
    """Every adjective with every noun, as ``adjective-noun``, like RULER's keys."""
    return tuple(f"{one}-{other}" for one, other in product(ADJECTIVES, NOUNS))


def made_up(rng: random.Random) -> Iterator[str]:
    """Endless three-syllable words that are in no dictionary; some may repeat."""
    while True:
        syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
        yield "".join(syllables) + rng.choice("dklmnrst")


def many_words(count: int, rng: random.Random) -> list[str]:
    """``count`` different words in random order, preferring common ones.

    They are words in Python's library, then rare ones, then made-up ones.
    """
    ordinary, rare = library_words(), rarer_words()
    words = dict.fromkeys(rng.sample(ordinary, min(count, len(ordinary))))
    if len(words) < count:
        words |= dict.fromkeys(rng.sample(rare, min(count - len(words), len(rare))))
    made = made_up(rng)
    while len(words) < count:  # ends: there are millions
        words[next(made)] = None
    return list(words)
