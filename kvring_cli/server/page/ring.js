// The ring, asked for each second: how full both tiers are, what runs, and where each page of each request is.
import { $, add, failure, headers, served, whole } from "./page.js";

const KINDS = {
  s: ["sink", "sink: the first pages, always seen"],
  k: ["selected", "selected: its keys answer the question"],
  l: ["lexical", "selected: it shares words with the question"],
  n: ["neighbor", "selected: it stands beside one that was"],
  r: ["recent", "recent: the newest pages, always seen"],
  o: ["open", "open: still being written"],
  w: ["resident", "resident: in the pool for none of these reasons"],
  ".": ["cold", "cold: in the host store only"],
};
const CELL = 9; // px of a page
const STEP = 11; // px from one page to the next
const ROWS = 60; // a longer strip is drawn with several pages a cell

let shown = []; // {caption, strip} of what runs, else of what was seen last
let tiers = null; // the pages of the window, by kind

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
    const letter = [..."oklnsrw"].find((kind) => pages.includes(kind)) ?? ".";
    brush.fillStyle = colours.getPropertyValue(`--${KINDS[letter][0]}`);
    const size = letter === "." ? CELL / 3 : CELL; // a small dot where nothing is in the pool: not by colour alone
    const inset = (CELL - size) / 2;
    brush.fillRect((cell % across) * STEP + inset, Math.floor(cell / across) * STEP + inset, size, size);
  }
  return group;
}

function running(session) {
  const state =
    session.state === "prefill"
      ? `reads ${whole(session.processed_tokens)} of ${whole(session.prompt_tokens)} tokens`
      : `wrote ${whole(session.generated_tokens)} after ${whole(session.prompt_tokens)} tokens`;
  const caption = `request ${session.request} · ${state}, ${whole(session.cached_tokens)} cached · ${session.mode}`;
  return { caption, strip: session.strip };
}

// The pages of a finished answer. Each layer selects anew at each step, so in a long answer nearly every page is
// selected once: those count here that were selected most often, as many as one selection holds (as in `--explain`).
function answered({ pages, recall }) {
  const times = pages.map(({ steps }) => Object.values(steps).reduce((sum, count) => sum + count, 0));
  const size = Math.ceil(recall.pages_selected / Math.max(1, recall.selections));
  const order = [...times.keys()].filter((at) => times[at]).sort((a, b) => times[b] - times[a]);
  const chosen = new Set(order.slice(0, size));
  const letter = ({ resident, steps }, at) => {
    if (chosen.has(at)) {
      const reason = Object.keys(steps).reduce((most, name) => (steps[name] > steps[most] ? name : most));
      return { lexical: "l", neighbor: "n" }[reason] ?? "k";
    }
    if (at < (tiers?.sink ?? 0)) return "s";
    if (at === pages.length - 1) return "o";
    if (at >= pages.length - (tiers?.recent ?? 0)) return "r";
    return resident ? "w" : ".";
  };
  return { caption: `the last answer · ${whole(pages.length)} pages`, strip: pages.map(letter).join("") };
}

function drawStrips() {
  const holder = $("windows");
  while (holder.children.length > shown.length) holder.lastChild.remove();
  const counts = {};
  shown.forEach(({ caption, strip }, index) => {
    const figure = holder.children[index] ?? add(holder, "figure");
    const title = figure.children[0] ?? add(figure, "figcaption");
    const canvas = figure.children[1] ?? add(figure, "canvas");
    const group = paint(canvas, strip);
    title.textContent = caption + (group > 1 ? ` · ${group} pages a cell` : "");
    const own = {};
    for (const letter of strip) own[KINDS[letter][0]] = (own[KINDS[letter][0]] ?? 0) + 1;
    for (const [name, count] of Object.entries(own)) counts[name] = (counts[name] ?? 0) + count;
    canvas.setAttribute("role", "img");
    const told = Object.entries(own).map(([name, count]) => `${count} ${name}`);
    canvas.setAttribute("aria-label", `Pages: ${told.join(", ")}`);
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
  $(`${name}-text`).textContent = `${whole(tier.used)} of ${whole(tier.pages)} pages, ${unit}`;
}

const gib = (bytes) => (bytes < 2 ** 30 ? `${whole(bytes / 2 ** 20)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`);

function draw(ring) {
  served.model = ring.model;
  $("model").textContent = `${ring.model} · ${ring.backend} · context ${whole(ring.context_tokens)} tokens in ${ring.kv_dtype}`;
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
  tiers = ring.window;
  if (ring.sessions.length) shown = ring.sessions.map(running);
  drawStrips();
}

async function look() {
  if (document.hidden) return;
  try {
    const response = await fetch("v1/ring", { headers: headers() });
    if (!response.ok) throw await failure(response);
    draw(await response.json());
  } catch (error) {
    $("ring-state").textContent = error instanceof TypeError ? "the server doesn't answer" : error.message;
  }
}

async function watch() {
  await look();
  setTimeout(watch, 1000);
}

document.addEventListener("answered", ({ detail }) => {
  shown = [answered(detail)];
  drawStrips();
});
drawLegend({});
watch();
