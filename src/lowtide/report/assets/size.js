"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const width = () => Math.min(1000, document.querySelector("main").clientWidth - 56);
  const colours = ["#1f6fb2", "#0a7a3c", "#b42318", "#8250a8"];
  const time = (t) => t >= 1 || t === 0 ? `${+t.toPrecision(4)} s` : `${+(1e3 * t).toPrecision(3)} ms`;
  const written = {bytes: size, seconds: time, number: (x) => `${+x.toPrecision(4)}`};
  data.forEach((plot, k) => {
    const joined = uPlot.join(plot.series.map((s) => [s.points.map((p) => p[0]), s.points.map((p) => p[1])]));
    const axis = (kind, label, log) => ({
      label, size: 80, space: kind === "bytes" ? 90 : 50, values: (u, ticks) => ticks.map((t) => t == null ? "" : written[kind](t)),
      ...(kind === "bytes" && !log ? {incrs: binary} : {}),
    });
    const top = 1.1 * Math.max(...plot.series.flatMap((s) => s.points.map((p) => p[1])));
    const xs = plot.series.flatMap((s) => s.points.map((p) => p[0]));
    const room = 0.06 * (Math.max(...xs) - Math.min(...xs)) || 1;
    const x = plot.log ? {time: false, distr: 3, log: 2} : {time: false, range: [Math.max(0, Math.min(...xs) - room), Math.max(...xs) + room]};
    new uPlot({
      width: width(), height: 340, scales: {x, y: {range: [0, top]}},
      axes: [axis(plot.x.kind, plot.x.label, plot.log), axis(plot.y.kind, plot.y.label)],
      series: [
        {label: plot.x.label, value: (u, v) => v == null ? "" : written[plot.x.kind](v)},
        ...plot.series.map((s, i) => ({
          label: s.name, stroke: colours[i % 4], width: s.line === false ? 0 : 2, spanGaps: true,
          dash: s.dash ? [6, 4] : [], points: {show: true, size: 8, fill: colours[i % 4]},
          value: (u, v) => v == null ? "" : written[plot.y.kind](v),
        })),
      ],
    }, joined, document.querySelectorAll(".plot")[k]);
  });
})();
