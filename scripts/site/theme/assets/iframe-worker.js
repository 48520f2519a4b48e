/* Search on pages that are opened from disk: a browser gives file:// no workers, so the search runs in a hidden frame.
   The frame gets messages as its own events, and what it posts becomes a message of the object that stands for it. */
(() => {
  "use strict"
  if (location.protocol !== "file:") return

  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.title = "Search"
      document.body.append(frame)
      this.frame = frame
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        script.onload = resolve
        script.onerror = reject
        script.src = new URL(url, document.baseURI)
        inside.document.body.append(script)
      })
    }

    postMessage(data) {
      const inside = this.frame.contentWindow
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
})()
