"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const roles = data.roles, colours = data.colours, R = roles.length;
  const PHASES = {data: "#eceff3", zero_grad: "#e3e3f7", forward: "#e3f0e3", loss: "#fbf0d6", backward: "#f7e2e0",
    optimizer: "#e0eef7", evaluation: "#f0e6f7"};
  const floats = (text) => {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new Float32Array(bytes.buffer);
  };
  const element = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const unpack = (step) => {
    if (!step.cumulative) {
      step.times = floats(step.time); step.entries = floats(step.entry); step.values = floats(step.kib);
      const n = step.times.length;
      step.ordinals = Float32Array.from({length: n}, (_, i) => i);
      step.cumulative = roles.map(() => new Float64Array(n));
      for (let i = 0; i < n; i++) {
        let sum = 0;
        for (let r = 0; r < R; r++) { sum += Math.max(0, step.values[i * R + r]) * 1024; step.cumulative[r][i] = sum; }
      }
    }
    return step;
  };

  let shown = data.shown, across = "time", chart = null;
  const place = document.getElementById("chart"), tip = document.getElementById("tip");

  const compose = (step, i, title) => {
    document.getElementById("when").textContent = title;
    const box = document.getElementById("composition");
    box.replaceChildren();
    const total = step.cumulative[R - 1][i];
    box.append(element("div", `${size(total)} in ${step.names[step.op[i]] || "?"}`));
    const where = [step.names[step.module[i]], step.names[step.source[i]]].filter(Boolean).join(", ");
    if (where) box.append(element("div", where, "small"));
    const bar = element("div", undefined, "bar");
    const table = element("table");
    const order = roles.map((_, r) => r).sort((a, b) => step.values[i * R + b] - step.values[i * R + a]);
    for (const r of order) {
      const bytes = step.values[i * R + r] * 1024;
      if (Math.abs(bytes) < 1) continue;
      const cell = element("span"); cell.style.background = colours[r]; cell.style.flex = `${Math.max(0, bytes)} 0 0`; bar.append(cell);
      const row = element("tr"), name = element("td"), swatch = element("span", undefined, "swatch");
      swatch.style.background = colours[r];
      name.append(swatch, roles[r].replace("_", " "));
      row.append(name, element("td", size(bytes), "n"), element("td", total ? (100 * bytes / total).toFixed(1) + " %" : "", "n"));
      table.append(row);
    }
    box.append(bar, table);
    const entry = step.entries[i];
    const list = element("table");
    let listed = 0;
    for (const [bytes, spans, what, at] of step.blocks) {
      const span = spans.find((s) => s[0] <= entry && entry < s[1]);
      if (!span) continue;
      const row = element("tr"), cell = element("td"), swatch = element("span", undefined, "swatch");
      swatch.style.background = colours[span[2]];
      cell.append(swatch, what);
      if (at) cell.append(element("div", at, "small"));
      row.append(element("td", size(bytes), "n"), cell);
      list.append(row);
      if (++listed >= 12) break;
    }
    box.append(element("div", "largest", "small"), list);
  };

  const bands = (step) => (u) => {
    const ctx = u.ctx, {top, height, left, width} = u.bbox;
    ctx.save();
    ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    for (const [name, from, to] of step.phases) {
      const first = across === "time" ? from : nearest(step.times, from), last = across === "time" ? to : nearest(step.times, to);
      const a = u.valToPos(first, "x", true), b = u.valToPos(last, "x", true);
      ctx.fillStyle = PHASES[name] || "#eee";
      ctx.fillRect(a, top, b - a, height);
      if (b - a > 52 * devicePixelRatio) { ctx.fillStyle = "#555"; ctx.fillText(name, Math.max(a, left) + 5, top + 14 * devicePixelRatio); }
    }
    ctx.restore();
  };
  const nearest = (sorted, value) => {
    let low = 0, high = sorted.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (sorted[mid] < value) low = mid + 1; else high = mid; }
    return low;
  };

  const draw = () => {
    const step = unpack(data.steps[shown]);
    if (chart) chart.destroy();
    const order = roles.map((_, r) => r).reverse();
    const x = across === "time" ? step.times : step.ordinals;
    const lines = order.map((r) => ({
      label: roles[r].replace("_", " "), stroke: colours[r], fill: colours[r], width: 0.5, points: {show: false},
      paths: uPlot.paths.stepped({align: 1}), value: (u, v, s, i) => (i == null ? "" : size(step.values[i * R + r] * 1024)),
    }));
    const columns = [x, ...order.map((r) => step.cumulative[r])];
    if (data.other) {
      const before = unpack(data.other), last = before.times[before.times.length - 1] || 1, own = step.times[step.times.length - 1] || 1;
      const at = (i) => Math.min(before.times.length - 1, across === "time"
        ? nearest(before.times, step.times[i] * last / own) : Math.round(i * (before.times.length - 1) / Math.max(1, x.length - 1)));
      const total = before.cumulative[R - 1];
      columns.push(Float64Array.from({length: x.length}, (_, i) => {  // the highest until the next instant: a short peak is not lost
        let highest = 0;
        for (let k = i ? at(i) : 0, end = Math.max(k, i + 1 < x.length ? at(i + 1) - 1 : total.length - 1); k <= end; k++) highest = Math.max(highest, total[k]);
        return highest;
      }));
      lines.push({label: "before", stroke: "#111", width: 1.5, dash: [5, 4], points: {show: false}, value: (u, v) => (v == null ? "" : size(v))});
    }
    chart = new uPlot({
      width: place.clientWidth, height: 430,
      scales: {x: {time: false}, y: {range: (u, low, high) => [0, high * 1.06 || 1]}},
      axes: [{values: (u, ticks) => ticks.map((t) => (across === "time" ? (t * 1000).toFixed(t < 0.01 ? 1 : 0) + " ms" : t))},
        {size: 78, incrs: binary, values: (u, ticks) => ticks.map(size)}],
      series: [{label: across === "time" ? "time" : "instant", value: (u, v) => (v == null ? "" : across === "time" ? (v * 1000).toFixed(2) + " ms" : v)}, ...lines],
      cursor: {points: {show: false}},
      hooks: {
        drawClear: [bands(step)],
        setCursor: [(u) => {
          const i = u.cursor.idx;
          if (i == null || u.cursor.left < 0) { tip.style.display = "none"; return; }
          tip.replaceChildren(element("b", size(step.cumulative[R - 1][i])), element("div", step.names[step.op[i]] || ""),
            element("div", step.names[step.module[i]] || "", "small"), element("div", step.names[step.source[i]] || "", "small"));
          const box = u.over.getBoundingClientRect(), right = box.left + u.cursor.left;
          tip.style.display = "block";
          tip.style.left = Math.min(right + 14, innerWidth - tip.offsetWidth - 8) + "px";
          tip.style.top = box.top + Math.min(u.cursor.top + 14, box.height - 70) + "px";
        }],
      },
    }, columns, place);
    chart.over.addEventListener("mouseleave", () => { tip.style.display = "none"; });
    chart.over.addEventListener("click", () => {
      const i = chart.cursor.idx;
      if (i != null) compose(step, i, `At ${(step.times[i] * 1000).toFixed(2)} ms of step ${step.step}`);
    });
    let highest = 0;
    for (let i = 1; i < step.times.length; i++) if (step.cumulative[R - 1][i] > step.cumulative[R - 1][highest]) highest = i;
    compose(step, highest, `At the high-water mark of step ${step.step}`);
  };

  const choices = (id, names, current, choose) => {
    const holder = document.getElementById(id);
    names.forEach((name, i) => {
      const button = element("button", name);
      button.className = i === current ? "on" : "";
      button.addEventListener("click", () => {
        for (const other of holder.children) other.className = "";
        button.className = "on"; choose(i); draw();
      });
      holder.append(button, " ");
    });
  };

  if (data.steps.length) {
    choices("steps", data.steps.map((s) => String(s.step)), shown, (i) => { shown = i; });
    choices("axes", ["time", "operators"], 0, (i) => { across = ["time", "operators"][i]; });
    draw();
    addEventListener("resize", () => chart.setSize({width: place.clientWidth, height: 430}));
  }
  if (data.peaks.length > 1) {
    const holder = document.getElementById("peaks");
    new uPlot({
      width: holder.clientWidth, height: 170, scales: {x: {time: false}, y: {range: (u, low, high) => [0, high * 1.08 || 1]}},
      axes: [{values: (u, ticks) => ticks.map((t) => (Number.isInteger(t) ? t : ""))}, {size: 78, incrs: binary, values: (u, ticks) => ticks.map(size)}],
      series: [{label: "step"}, {label: "peak", stroke: "#4e79a7", fill: "#4e79a733", width: 1.5, points: {show: data.peaks.length < 80}, value: (u, v) => (v == null ? "" : size(v))}],
    }, [data.peaks.map((p) => p[0]), data.peaks.map((p) => p[1])], holder);
  }
  else document.getElementById("every").remove();
  window.lowtideChart = () => chart;
  window.lowtideReady = true;
})();
