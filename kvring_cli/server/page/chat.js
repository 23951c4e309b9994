// The chat. The whole conversation is sent each time; the server finds what it has computed before.

import { $, add, failure, headers, served, whole } from "./page.js";

const turns = []; // {role, content}, as they are sent
let running = null; // AbortController of the answer that is being written

// The payloads of server-sent events, and what stands in comments (": keep-alive done/total").
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (value ?? "")).split(/\r?\n/);
    rest = done ? "" : lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield { data: line.slice(5).trim() };
      else if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
    }
    if (done) return;
  }
}

function bubble(role, text) {
  $("empty")?.remove();
  const article = add($("log"), "article", undefined, role);
  article.setAttribute("aria-label", role === "user" ? "You" : "Model");
  return { article, text: add(article, "div", text) };
}

function follow(change) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function busy(controller) {
  running = controller;
  $("send").disabled = $("fresh").disabled = controller !== null;
  $("stop").disabled = controller === null;
  $("log").setAttribute("aria-busy", String(controller !== null));
}

// What the last chunks of a stream say of the answer, in one line.
function summary({ usage, timings, kvring }, firstToken) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [
    `prompt ${whole(usage.prompt_tokens)}`,
    `cached ${whole(cached)} (${Math.floor((100 * cached) / usage.prompt_tokens)}%)`,
    `output ${whole(usage.completion_tokens)}`,
  ];
  if (firstToken !== null) parts.push(`first token after ${firstToken.toFixed(2)} s`);
  if (timings?.predicted_per_second) parts.push(`${timings.predicted_per_second.toFixed(1)} tok/s`);
  const recall = kvring?.recall;
  if (recall?.over_pool) parts.push(`larger than the pool: ${whole(recall.pages_selected)} pages selected`);
  return parts.join(" · ");
}

async function ask(question) {
  bubble("user", question);
  turns.push({ role: "user", content: question });
  const { article, text } = bubble("assistant", "");
  const controller = new AbortController();
  busy(controller);
  $("status").textContent = "reading";
  $("log").scrollTop = $("log").scrollHeight;
  const began = performance.now();
  const end = {}; // usage, timings and kvring, from whichever chunk brings them
  let firstToken = null; // seconds
  let answer = "";
  let thought = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: controller.signal,
      body: JSON.stringify({
        model: served.model,
        messages: turns,
        stream: true,
        stream_options: { include_usage: true },
        kvring: { explain: true },
      }),
    });
    if (!response.ok) throw await failure(response);
    let ended = false;
    for await (const { data, comment } of events(response.body)) {
      const progress = comment?.match(/(\d+)\/(\d+)/);
      if (progress) $("status").textContent = `reading ${whole(+progress[1])} of ${whole(+progress[2])} tokens`;
      if (data === "[DONE]") ended = true;
      if (data === undefined || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices?.[0]?.delta ?? {};
      if (delta.reasoning_content || delta.content) {
        firstToken ??= (performance.now() - began) / 1000;
        $("status").textContent = "writing";
      }
      follow(() => {
        if (delta.reasoning_content) {
          thought ??= article.insertBefore(add(article, "div", "", "thought"), text);
          thought.textContent += delta.reasoning_content;
        }
        if (delta.content) text.textContent = answer += delta.content;
      });
      for (const name of ["usage", "timings", "kvring"]) end[name] = chunk[name] ?? end[name];
    }
    if (!ended) throw new Error("the server stopped in the middle of the answer");
    follow(() => {
      if (end.usage) add(article, "p", summary(end, firstToken), "note");
      for (const warning of end.kvring?.warnings ?? []) add(article, "p", warning, "note wrong");
    });
    if (end.kvring?.pages) document.dispatchEvent(new CustomEvent("answered", { detail: end.kvring }));
    $("status").textContent = "";
  } catch (error) {
    const stopped = controller.signal.aborted;
    $("status").textContent = stopped ? "stopped" : "";
    follow(() => add(article, "p", stopped ? "stopped" : error.message, stopped ? "note" : "note wrong"));
  }
  if (answer) turns.push({ role: "assistant", content: answer });
  else {
    turns.pop(); // nothing was said: the question can be sent again
    $("prompt").value ||= question;
  }
  if (running === controller) busy(null);
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("prompt").value.trim();
  if (running || !question) return;
  $("prompt").value = "";
  ask(question);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("prompt").focus();
});
$("fresh").addEventListener("click", () => {
  turns.length = 0;
  $("log").replaceChildren();
  $("status").textContent = "";
  $("prompt").focus();
});
