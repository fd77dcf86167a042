// Runs the program of a timeline page with a made-up browser, and prints what a person would see, as JSON:
// node browser.js PAGE lanes|jobs
"use strict";
const [, , file, view] = process.argv;
const html = require("fs").readFileSync(file, "utf8");
const program = html.match(/<script>([\s\S]*)<\/script>/)[1];
const css = {};
for (const part of html.match(/:root \{([^}]*)\}/)[1].split(";")) {
  const [name, value] = part.split(":");
  if (value) css[name.trim()] = value.trim();
}
let rectangles = [], texts = [];

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], style: {}, dataset: {}, listeners: {}, clientWidth: 1000, offsetWidth: 100 });
  }
  append(...children) { this.children.push(...children); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  setAttribute() {}
  getBoundingClientRect() { return { left: 0, top: 0, width: 1000 }; }
  getContext() {
    return {
      scale() {}, beginPath() {}, moveTo() {}, lineTo() {}, stroke() {},
      fillRect() { rectangles.push(this.fillStyle); },
      fillText(text) { texts.push(text); },
    };
  }
  get whole() {
    return (this.textContent || "") + this.children.map(one => typeof one === "string" ? one : one.whole).join("");
  }
}

const known = {}, buttons = ["lanes", "jobs"].map(name => Object.assign(new Element("button"), { dataset: { view: name } }));
const get = name => known[name] = known[name] || new Element(name);
global.document = {
  documentElement: {}, getElementById: get, querySelector: get,
  createElement: tag => new Element(tag), querySelectorAll: () => buttons,
};
global.getComputedStyle = () => ({ getPropertyValue: name => css[name] || "" });
global.window = { devicePixelRatio: 1 };
global.innerWidth = 1000;
global.addEventListener = () => {};
new Function(program)();
[rectangles, texts] = [[], []];
buttons.find(button => button.dataset.view === view).listeners.click();
const chart = known.main.children.find(one => one.className === "chart").children[0];
for (let x = 118; x < 1000 && !known.tip.textContent; x += 10) chart.listeners.mousemove({ clientX: x, clientY: 5 });
const legend = known.legend.children.map(item => {
  const box = item.children.find(one => typeof one !== "string");
  return [box ? box.style.background : null, item.whole];
});
const visible = html.replace(/<script>[\s\S]*<\/script>/, "").replace(/<style>[\s\S]*<\/style>/, "").replace(/<[^>]*>/g, " ");
console.log(JSON.stringify({
  legend, rectangles, tip: known.tip.textContent, text: [visible, known.main.whole, ...texts].join("\n"),
}));
