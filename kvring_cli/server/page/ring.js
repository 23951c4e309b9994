// The ring, asked for each second: how full both tiers are, what runs, and where each page of each request is.
"use strict";

const KINDS = {
  s: ["sink", "sink: the first pages, always seen"],
  k: ["selected", "selected: brought back because the question needs it"],
  r: ["recent", "recent: the newest pages, always seen"],
  o: ["open", "open: still being written"],
  w: ["resident", "in the pool for none of these reasons"],
  ".": ["cold", "cold: in the host store only"],
};
const CELL = 9; // px of a page
const STEP = 11; // px from one page to the next
const ROWS = 60; // a longer strip is drawn with several pages a cell

let shown = []; // the sessions that were active last; they stay until others are

function paint(canvas, strip) {
  const width = Math.max(STEP, canvas.parentElement.clientWidth);
  const across = Math.floor((width + STEP - CELL) / STEP);
  const group = Math.ceil(strip.length / (across * ROWS)) || 1;
  const cells = Math.ceil(strip.length / group);
  const height = Math.ceil(cells / across) * STEP;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(ratio, ratio);
  const colours = getComputedStyle(document.documentElement);
  for (let cell = 0; cell < cells; cell++) {
    const pages = strip.slice(cell * group, (cell + 1) * group);
    const letter = [..."oksrw."].find((kind) => pages.includes(kind)) ?? ".";
    brush.fillStyle = colours.getPropertyValue(`--${KINDS[letter][0]}`);
    const size = letter === "." ? CELL / 3 : CELL; // a small dot where nothing is in the pool: not by colour alone
    const inset = (CELL - size) / 2;
    brush.fillRect((cell % across) * STEP + inset, Math.floor(cell / across) * STEP + inset, size, size);
  }
  return group;
}

function describe(session) {
  const state =
    session.state === "prefill"
      ? `reads ${whole(session.processed_tokens)} of ${whole(session.prompt_tokens)} tokens`
      : `wrote ${whole(session.generated_tokens)} after ${whole(session.prompt_tokens)} tokens`;
  return `request ${session.request} · ${state}, ${whole(session.cached_tokens)} cached · ${session.mode}`;
}

function drawSessions(running) {
  if (running.length) shown = running;
  const holder = $("windows");
  while (holder.children.length > shown.length) holder.lastChild.remove();
  const counts = {};
  shown.forEach((session, index) => {
    let figure = holder.children[index];
    if (!figure) {
      figure = add(holder, "figure");
      add(figure, "figcaption");
      add(figure, "canvas").setAttribute("role", "img");
    }
    figure.classList.toggle("past", !running.length);
    const [caption, canvas] = figure.children;
    const group = paint(canvas, session.strip);
    caption.textContent = describe(session) + (running.length ? "" : " · done") + (group > 1 ? ` · ${group} a cell` : "");
    const pages = Object.entries(session.pages).filter(([, count]) => count);
    canvas.setAttribute("aria-label", `Pages: ${pages.map(([name, count]) => `${count} ${name}`).join(", ")}`);
    for (const [name, count] of pages) counts[name] = (counts[name] ?? 0) + count;
  });
  drawLegend(counts);
}

function drawLegend(counts) {
  const legend = $("legend");
  legend.replaceChildren();
  for (const [name, meaning] of Object.values(KINDS)) {
    const item = add(legend, "li");
    add(item, "i", undefined, name);
    add(item, "span", `${counts[name] === undefined ? "" : `${whole(counts[name])} `}${meaning}`);
  }
}

function bar(name, tier, unit) {
  $(name).max = tier.pages;
  $(name).value = tier.used;
  $(`${name}-text`).value = `${whole(tier.used)} of ${whole(tier.pages)} pages, ${unit}`;
}

const gib = (bytes) => (bytes < 2 ** 30 ? `${whole(bytes / 2 ** 20)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`);

function draw(ring) {
  model = ring.model;
  $("model").textContent = `${ring.model} · ${ring.backend} · context ${whole(ring.context_tokens)} tokens`;
  $("ring-state").textContent = ring.ring
    ? `on: ${ring.window.sink} sink, ${ring.window.selection} selected, ${ring.window.recent} recent pages`
    : "off: the pool holds the whole context";
  bar("pool", ring.pool, gib(ring.pool.bytes));
  bar("host", ring.host, gib(ring.host.bytes));
  $("active").textContent = `${ring.queue.active} / ${ring.queue.max_active}`;
  $("waiting").textContent = whole(ring.queue.waiting);
  $("cached").textContent = whole(ring.totals.cached_tokens);
  const rates = ring.sessions.map((session) => session[`${session.state}_tokens_per_second`]);
  $("rate").textContent = rates.length ? whole(rates.reduce((sum, rate) => sum + rate, 0)) : "–";
  drawSessions(ring.sessions);
}

async function look() {
  try {
    if (!document.hidden) {
      const response = await fetch("v1/ring", { headers: headers() });
      if (!response.ok) throw await failure(response);
      draw(await response.json());
    }
  } catch (error) {
    $("ring-state").textContent = error instanceof TypeError ? "the server doesn't answer" : error.message;
  }
  setTimeout(look, 1000);
}

drawLegend({});
look();
