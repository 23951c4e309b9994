// What chat.js and ring.js share. What a model says only ever becomes text, never markup.

export const $ = (id) => document.getElementById(id);
export const whole = (number) => Math.round(number).toLocaleString("en");

export function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

export function add(parent, tag, text, name) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// What to throw for an answer that is none.
export async function failure(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `the server answered ${response.status}`);
}

// The model's id, as GET /v1/ring last told it.
export const served = { model: "default" };
