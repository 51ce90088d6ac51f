"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const width = () => Math.min(1400, document.getElementById("profile").clientWidth);
  const bytesAxis = {values: (u, ticks) => ticks.map(size), incrs: binary, size: 80};
  const line = (text, y, colour, side) => (u) => {
    if (y == null) return;
    const at = u.valToPos(y, "y", true);
    if (at < u.bbox.top || at > u.bbox.top + u.bbox.height) return;
    const c = u.ctx;
    c.save();
    c.strokeStyle = colour; c.fillStyle = colour; c.setLineDash([6, 4]); c.lineWidth = devicePixelRatio;
    c.beginPath(); c.moveTo(u.bbox.left, at); c.lineTo(u.bbox.left + u.bbox.width, at); c.stroke();
    c.font = `${12 * devicePixelRatio}px system-ui`; c.textAlign = side;
    const inset = 6 * devicePixelRatio;
    c.fillText(`${text} ${size(y)}`, side === "left" ? u.bbox.left + inset : u.bbox.left + u.bbox.width - inset, at - 5 * devicePixelRatio);
    c.restore();
  };
  const tables = [data.plain, ...(data.plan ? [data.plan] : [])];
  const joined = uPlot.join(tables);
  const stepped = uPlot.paths.stepped({align: -1});
  const top = 1.08 * Math.max(data.budget || 0, ...tables.map((t) => Math.max(...t[1])));
  const seconds = (u, ticks) => ticks.map((t) => t >= 1 || t === 0 ? `${+t.toPrecision(6)} s` : `${+(1e3 * t).toPrecision(4)} ms`);
  new uPlot({
    width: width(), height: 360, scales: {x: {time: false}, y: {range: [0, top]}},
    axes: [{values: seconds}, bytesAxis],
    series: [
      {label: "seconds"},
      {label: "without a plan", stroke: "#9aa5b1", width: 1.5, paths: stepped, spanGaps: true, points: {show: false}, value: (u, v) => v == null ? "" : size(v)},
      ...(data.plan ? [{label: "with the plan", stroke: "#1f6fb2", fill: "#1f6fb222", width: 1.8, paths: stepped, spanGaps: true, points: {show: false}, value: (u, v) => v == null ? "" : size(v)}] : []),
    ],
    hooks: {draw: [line("budget", data.budget, "#b42318", "right"), line("minimum", data.floor, "#0a7a3c", "left")]},
  }, joined, document.getElementById("profile"));
  if (data.curve.length < 2) { document.getElementById("curve-part").remove(); return; }
  const price = (u, v) => v == null ? "" : `${v.toPrecision(3)} ms`;
  const percent = (u, v) => v == null ? "" : `${v.toFixed(2)} %`;
  new uPlot({
    width: Math.min(900, width()), height: 300, scales: {x: {time: false}},
    axes: [
      {values: (u, ticks) => ticks.map(size), incrs: binary, space: 90}, {values: (u, ticks) => ticks.map((t) => `${t} %`)},
      {scale: "price", side: 1, size: 70, grid: {show: false}, values: (u, ticks) => ticks.map((t) => `${t} ms`)},
    ],
    series: [
      {label: "budget", value: (u, v) => v == null ? "" : size(v)},
      {label: "plan", stroke: "#1f6fb2", width: 2, points: {show: true, size: 6}, value: percent},
      {label: "bound", stroke: "#0a7a3c", fill: "#0a7a3c18", width: 1.5, dash: [5, 4], value: percent},
      {label: "1 MiB more saves", scale: "price", stroke: "#b45309", width: 1, dash: [2, 3], points: {show: false}, value: price},
    ],
  }, [0, 1, 2, 3].map((k) => data.curve.map((c) => c[k])), document.getElementById("curve"));
})();
