// Events that differ in numbers alone share a row.

import { el } from "./dom.js";

const NEAR_S = 10;

const shape = (event) => `${event.what} ${event.why}`.replace(/[\d.,]+( ms| s\b| MiB| GiB)?/g, "#").replace(/# \w+/g, "#");

// [the first of them, how many], of events in either order of time; ones of the reader's own request stay apart.
export function folded(events) {
  const rows = [];
  const open = new Map();
  for (const event of events) {
    const key = event.mine ? {} : shape(event);
    const row = open.get(key);
    if (row && Math.abs(row[0].t - event.t) <= NEAR_S) row[1] += 1;
    else {
      const made = [event, 1];
      open.set(key, made);
      rows.push(made);
    }
  }
  return rows;
}

export const more = (num) => (num > 1 ? el("b", {}, ` ${num - 1} more like it within ${NEAR_S} s.`) : null);
