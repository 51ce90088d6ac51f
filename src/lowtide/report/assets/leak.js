"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const width = Math.min(1400, document.querySelector("main").clientWidth - 40);
  const names = {held: "held (heap and Python)", heap: "heap in use", python: "Python objects", resident: "resident"};
  const colours = {held: "#1f6fb2", heap: "#b26a1f", python: "#7a3fb2", resident: "#7b8794"};
  const strength = ["", "99", "55"];  // the first process in full colour, later ones fainter
  let shown = new Set(["held", "resident"]);
  const place = document.getElementById("growth");
  const draw = () => {
    place.replaceChildren();
    const longest = Math.max(1, ...data.processes.map((p) => Math.max(...Object.values(p).map((v) => v ? v.length : 0))));
    const x = Array.from({length: longest}, (_, i) => i + 1);
    const columns = [x], series = [{label: "step"}];
    data.processes.forEach((p, k) => {
      for (const name of Object.keys(names)) {
        if (!shown.has(name) || !p[name]) continue;
        const base = p[name].find((v) => v != null);
        columns.push(x.map((_, i) => p[name][i] == null ? null : p[name][i] - base));
        series.push({label: `${names[name]}, process ${k + 1}`, stroke: colours[name] + strength[Math.min(k, 2)], width: k ? 1.2 : 1.8, dash: k ? [2, 2] : undefined,
          spanGaps: true, points: {show: false}, value: (u, v) => v == null ? "" : size(v)});
      }
    });
    const held = data.processes.length ? data.processes[data.processes.length - 1].held : null;
    const from = held ? (held[data.start] ?? 0) - (held.find((v) => v != null) ?? 0) : 0;
    columns.push(x.map((s) => s < data.start ? null : from + data.tolerance * (s - data.start)));
    series.push({label: "tolerance", stroke: "#b42318", width: 1.2, dash: [7, 5], spanGaps: true, points: {show: false}, value: (u, v) => v == null ? "" : size(v)});
    new uPlot({width, height: 380, scales: {x: {time: false}}, axes: [{}, {values: (u, ticks) => ticks.map(size), incrs: binary, size: 80}], series}, columns, place);
  };
  const which = document.getElementById("which");
  for (const name of Object.keys(names)) {
    const button = document.createElement("button");
    button.textContent = names[name];
    button.className = shown.has(name) ? "on" : "";
    button.onclick = () => {
      shown.has(name) ? shown.delete(name) : shown.add(name);
      button.className = shown.has(name) ? "on" : "";
      draw();
    };
    which.append(button);
  }
  draw();
  if (!data.arms) return;
  const colour = (i) => `hsl(${(i * 47) % 360} 60% ${i < 6 ? 38 : 62}%)`;
  const arms = (each) => {
    const parts = document.getElementById("arms");
    parts.replaceChildren();
    const steps = new Set();
    data.arms.forEach((a) => a.curve.forEach((v, i) => { if (v != null) steps.add(i + 1); }));
    const x = [...steps].sort((a, b) => a - b);
    const columns = data.arms.map((a) => {
      const all = x.map((s) => a.curve[s - 1] ?? null);
      return each ? all.map((v, i) => i && v != null && all[i - 1] != null ? (v - all[i - 1]) / (x[i] - x[i - 1]) : null) : all;
    });
    new uPlot({width: Math.min(900, parts.clientWidth || width), height: 320, scales: {x: {time: false}},
      axes: [{}, {values: (u, ticks) => ticks.map(size), incrs: binary, size: 80}],
      series: [{label: "step"}, ...data.arms.map((a, i) => ({label: a.name, stroke: colour(i), width: i < 6 ? 2 : 1.2, dash: i < 6 ? undefined : [4, 3],
        spanGaps: true, points: {show: false}, value: (u, v) => v == null ? "" : size(v)}))]}, [x, ...columns], parts);
    document.getElementById("total").className = each ? "" : "on";
    document.getElementById("each").className = each ? "on" : "";
  };
  document.getElementById("total").onclick = () => arms(false);
  document.getElementById("each").onclick = () => arms(true);
  arms(false);
})();
