/* Search in a site that lies in a folder: a browser starts no worker from a file, and search is one. There its script
   runs in a hidden frame, and gets and sends the same messages. On a server this does nothing. */
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.document.open();
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => frame.addEventListener("load", resolve));
      this.inside.document.write(`<script src="${new URL(url, location)}"></script>`);
      this.inside.document.close();
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
