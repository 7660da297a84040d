// Search runs in a worker, which browsers refuse to pages opened from disk: a hidden frame stands
// in for it there. The theme asks for `IFrameWorker` to know.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      const tell = (to, data) => to.dispatchEvent(new MessageEvent("message", { data }))
      inside.postMessage = data => {
        tell(this, data)
        this.onmessage?.({ data })
      }
      const script = inside.document.createElement("script")
      const loaded = new Promise(resolve => script.addEventListener("load", resolve))
      script.src = url
      inside.document.body.append(script)
      this.postMessage = data => loaded.then(() => tell(inside, data))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
