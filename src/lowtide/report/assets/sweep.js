"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const make = (name, attributes, parent, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
    if (text != null) node.textContent = text;
    parent.append(node);
    return node;
  };
  const points = data.points;
  if (points.length) {
    const w = 446, h = 330, left = 78, bottom = 42, place = document.getElementById("front");
    const svg = make("svg", {width: w, height: h, role: "img"}, place);
    const span = (v) => {
      const a = Math.min(...v), b = Math.max(...v), d = (b - a) || Math.abs(b) || 1, low = a - 0.08 * d;
      return [a >= 0 ? Math.max(0, low) : low, b + 0.08 * d];
    };
    const [x0, x1] = span(points.map((p) => p.growth)), [y0, y1] = span(points.map((p) => p.rate));
    const x = (v) => left + (v - x0) / (x1 - x0) * (w - left - 36), y = (v) => h - bottom - (v - y0) / (y1 - y0) * (h - bottom - 12);
    make("path", {d: `M${left},8V${h - bottom}H${w - 8}`, stroke: "#d8dde3", fill: "none"}, svg);
    for (let i = 0; i <= 4; i++) {
      const a = x0 + (x1 - x0) * i / 4, b = y0 + (y1 - y0) * i / 4;
      make("text", {x: x(a), y: h - bottom + 17, "text-anchor": "middle", class: "soft"}, svg, size(a));
      make("text", {x: left - 6, y: y(b) + 4, "text-anchor": "end", class: "soft"}, svg, b.toPrecision(3));
    }
    make("text", {x: (w + left) / 2, y: h - 6, "text-anchor": "middle"}, svg, "growth per step");
    make("text", {x: 12, y: h / 2, transform: `rotate(-90 12 ${h / 2})`, "text-anchor": "middle"}, svg, "rate (/s)");
    for (const p of points) {
      const dot = make("circle", {cx: x(p.growth), cy: y(p.rate), r: p.best ? 7 : 5, stroke: p.best ? "#0a7a3c" : "#1f6fb2", "stroke-width": 1.6,
        fill: p.best ? "#0a7a3c" : p.front ? "#1f6fb2" : "#ffffff"}, svg);
      make("title", {}, dot, `${p.name}\n${size(p.growth)} a step, ${p.rate.toPrecision(4)}/s`);
    }
  }
  const place = document.getElementById("effects");
  if (!place) return;
  for (const [response, title] of [["growth_bytes", "growth per step"], ["samples_per_second", "rate (/s)"]]) {
    const effects = data.effects.filter((e) => e.response === response);
    if (!effects.length) continue;
    const row = 22, left = 300, w = Math.min(860, place.clientWidth || 860), h = row * effects.length + 50;
    const all = effects.flatMap((e) => [0, e.change, e.low ?? e.change, e.high ?? e.change]);
    const a = Math.min(...all), b = Math.max(...all), d = (b - a) || 1;
    const x = (v) => left + (v - a + 0.05 * d) / (1.1 * d) * (w - left - 20);
    const svg = make("svg", {width: w, height: h, role: "img"}, place);
    make("text", {x: left, y: 14, "font-weight": 600}, svg, title);
    make("path", {d: `M${x(0)},22V${h - 22}`, stroke: "#9aa5b1", "stroke-dasharray": "4 3"}, svg);
    make("path", {d: `M${left},${h - 22}H${w - 8}`, stroke: "#d8dde3"}, svg);
    const told = (v) => response === "growth_bytes" ? size(v) : `${+v.toPrecision(2)}`;
    make("text", {x: x(0), y: h - 6, "text-anchor": "middle", class: "soft"}, svg, "no effect");
    for (const v of [a, b]) {
      if (Math.abs(x(v) - x(0)) > 80) make("text", {x: x(v), y: h - 6, "text-anchor": "middle", class: "soft"}, svg, (v > 0 ? "+" : "") + told(v));
    }
    effects.forEach((e, i) => {
      const at = 34 + i * row, sure = e.low != null && (e.low > 0 || e.high < 0), colour = sure ? "#b26a1f" : "#9aa5b1";
      make("text", {x: left - 10, y: at + 4, "text-anchor": "end"}, svg, e.name);
      if (e.low != null) make("path", {d: `M${x(e.low)},${at}H${x(e.high)}`, stroke: colour, "stroke-width": 3}, svg);
      const dot = make("circle", {cx: x(e.change), cy: at, r: 4.5, fill: colour}, svg);
      make("title", {}, dot, e.text);
    });
  }
})();
