// Builds and updates elements. Text from the platform is set only through textContent and setAttribute, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  const value = text === null || text === undefined ? "" : String(text);
  if (node.textContent !== value) node.textContent = value;
}

export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : String(value));
  }
  return node;
}

export function element(tag, attributes = {}, ...children) {
  const node = setAttributes(document.createElement(tag), attributes);
  node.append(...children);
  return node;
}

export function svgElement(tag, attributes = {}) {
  return setAttributes(document.createElementNS(SVG, tag), attributes);
}

// Keeps one node per key in `parent`, in the order of `items`. Nodes are updated in place, so that tooltips,
// focus and selected text survive an update.
export class KeyedList {
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.nodes = new Map();
  }

  update(items, keyOf, fill) {
    const seen = new Set();
    let previous = null;
    for (const item of items) {
      const key = keyOf(item);
      if (seen.has(key)) continue;
      seen.add(key);
      let node = this.nodes.get(key);
      if (node === undefined) {
        node = this.create(item);
        this.nodes.set(key, node);
      }
      fill(node, item);
      const place = previous === null ? this.parent.firstChild : previous.nextSibling;
      if (node !== place) this.parent.insertBefore(node, place);
      previous = node;
    }
    for (const [key, node] of this.nodes) {
      if (!seen.has(key)) {
        node.remove();
        this.nodes.delete(key);
      }
    }
  }
}
