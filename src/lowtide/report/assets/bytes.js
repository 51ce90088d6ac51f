"use strict";
// Sizes for people, and ticks of an axis of bytes: what both pages share.
const size = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0, x = Math.abs(bytes);
  while (x >= 1024 && i < 4) { x /= 1024; i++; }
  return (bytes < 0 ? "-" : "") + (i === 0 ? x.toFixed(0) : x >= 100 ? x.toFixed(0) : x.toFixed(x >= 10 ? 1 : 2)) + " " + units[i];
};
const binary = Array.from({length: 48}, (_, i) => 2 ** i);
