"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const width = Math.min(1400, document.querySelector("main").clientWidth - 40);
  const series = [{label: data.unit}], columns = [data.x];
  const add = (label, values, options) => {
    if (!values.some((v) => v)) return;
    columns.push(values);
    series.push({label, points: {show: values.length < 60}, value: (u, v) => v == null ? "" : size(v), ...options});
  };
  add("highest", data.highest, {stroke: "#1f6fb2", width: 1.8, fill: "rgba(31,111,178,0.10)"});
  add("at the end", data.resident, {stroke: "#7b8794", width: 1.2});
  add("unique", data.unique, {stroke: "#7a3fb2", width: 1.2});
  add("child processes", data.children, {stroke: "#b26a1f", width: 1.2});
  add("heap, highest", data.heap, {stroke: "#0a7a3c", width: 1.2});
  if (data.cap) add("cap", data.x.map(() => data.cap), {stroke: "#b42318", width: 1.4, dash: [7, 5], points: {show: false}});
  new uPlot({width, height: 380, scales: {x: {time: false}, y: {range: (u, low, high) => [0, high * 1.05]}},
    axes: [{}, {values: (u, ticks) => ticks.map(size), incrs: binary, size: 80}], series}, columns, document.getElementById("memory"));
})();
