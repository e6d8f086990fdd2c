// The site's search computes in a web worker, which browsers do not start for pages that are opened from a disk.
// There it computes in a hidden frame of the page, by the same interface.
if (location.protocol === "file:") {
  // By the second name the theme's script asks whether it is in a frame.
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = this.inside.document.createElement("script");
          script.onload = resolve;
          script.onerror = () => reject(new Error(`${source} cannot be loaded`));
          script.src = source;
          this.inside.document.body.append(script);
        });
      this.inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = load(url);
    }

    async postMessage(data) {
      await this.ready;
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }
  };
}
