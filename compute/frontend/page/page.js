// The page of a headrace server: a talk, and what the server does meanwhile.
// Everything comes from the server that sent this file; nothing is kept but the bearer token.
"use strict";

const LOOK_MS = 1500;
const TIERS = ["disk", "arena", "device"];
const PARTS = ["compute", "copies", "disk", "queue", "prompt", "other"];
const TOKEN = "headrace-token";
const at = (id) => document.getElementById(id);

function headers(more) {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { ...more, authorization: `Bearer ${token}` } : { ...more };
}

function made(kind, className, text) {
  const element = document.createElement(kind);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < 4) { count /= 1024; unit += 1; }
  return `${count < 10 && unit ? count.toFixed(1) : Math.round(count)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

function rate(value) {
  return value ? String(value < 100 ? value.toFixed(1) : Math.round(value)) : "–";
}

// What the server does

let before = null;

async function look() {
  try {
    const answer = await fetch("/v1/headrace/state?last=20", { headers: headers() });
    if (answer.status === 401) { askForToken(); return; }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    at("token").hidden = true;
    show(await answer.json());
  } catch (error) {
    say(`the server does not answer (${error.message})`, true);
  } finally {
    setTimeout(look, LOOK_MS);
  }
}

function askForToken() {
  at("token").hidden = false;
  say("a token is needed", true);
}

function say(text, bad) {
  at("status").textContent = text;
  at("status").classList.toggle("bad", Boolean(bad));
}

function show(state) {
  at("model").textContent = state.model;
  say(state.problem || (state.compute.state === "idle" ? "ready" : state.compute.state), state.problem);
  if (state.compute) showNow(state);
  if (state.tiers) { showTiers(state.tiers, state.compute); drawMap(state.tiers.rows); }
  const parts = PARTS.map((name) => [name, state.together.ms[name], name === "disk" ? "waits" : name]);
  showBar("parts", parts, (value) => `${Math.round(value)} ms`);
  at("why").textContent = state.together.why;
  at("rows").replaceChildren(...state.requests.map(rowOf));
}

function showNow(state) {
  const now = { at: performance.now(), ...state.compute };
  const ended = state.requests.filter((one) => one.end !== "running");
  const latest = (name) => (ended.find((one) => one[name]) || {})[name];
  at("decode").textContent = rate(latest("decode_tokens_per_second"));
  at("prefill").textContent = rate(latest("prefill_tokens_per_second"));
  at("waiting").textContent = now.n_waiting ?? "–";
  const since = before && now.hits >= before.hits ? before : { at: now.at, hits: 0, misses: 0, bytes_read: now.bytes_read };
  const seconds = (now.at - since.at) / 1000;
  at("reading").textContent = seconds ? `${bytes((now.bytes_read - since.bytes_read) / seconds)}/s` : "–";
  const picks = now.hits - since.hits + now.misses - since.misses;
  if (picks > 0) at("hits").textContent = `${(100 * (now.hits - since.hits) / picks).toFixed(1)} %`;
  before = now;
}

function showTiers(tiers, compute) {
  const counts = TIERS.map((name) => [name, tiers.experts[name], name]).filter(([name, n]) => name !== "device" || n);
  const size = compute.slot_bytes || 0;
  showBar("tiers", counts.reverse(), (value) => `${value} experts, ${bytes(value * size)}`);
}

// parts: [name, value, class]
function showBar(id, parts, words) {
  const whole = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  const spans = [], items = [];
  for (const [name, value, className] of parts) {
    const span = made("span", className);
    span.style.width = `${100 * value / whole}%`;
    span.title = `${name}: ${words(value)}`;
    spans.push(span);
    const item = made("li");
    item.append(made("i", className), `${name} ${words(value)}`);
    items.push(item);
  }
  at(id).replaceChildren(...spans);
  at(`${id}-legend`).replaceChildren(...items);
}

function drawMap(rows) {
  if (!rows.length) return;
  const canvas = at("map"), height = rows.length, width = rows[0].length;
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const style = getComputedStyle(document.documentElement);
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, width, height);
  for (let tier = 0; tier < TIERS.length; tier += 1) {
    context.fillStyle = style.getPropertyValue(`--${TIERS[tier]}`);
    rows.forEach((row, layer) => {
      for (let expert = 0; expert < width; expert += 1) {
        if (row[expert] === String(tier)) context.fillRect(expert, layer, 1, 1);
      }
    });
  }
  const there = rows.reduce((sum, row) => sum + row.replaceAll("0", "").length, 0);
  at("map-says").textContent =
    `${height} layers from top to bottom, ${width} experts from left to right; ` +
    `${there} of ${height * width} are in memory`;
}

function rowOf(one) {
  const row = made("tr");
  const rest = [
    one.prompt_tokens, one.cached_tokens, one.new_tokens, one.seconds.toFixed(2),
    one.decode_tokens_per_second ? one.decode_tokens_per_second.toFixed(1) : "–",
    one.misses, bytes(one.bytes_read), one.most || "–",
  ];
  const began = new Date(1000 * one.began).toLocaleTimeString();
  for (const text of [began, one.path, one.end, ...rest]) row.append(made("td", "", text));
  return row;
}

// The talk

const turns = [];
let running = null;

async function talk(text) {
  turns.push({ role: "user", content: text });
  at("talk").append(made("div", "turn user", text));
  const shown = new Shown();
  running = new AbortController();
  at("send").textContent = "Stop";
  try {
    await streamed(shown);
  } catch (error) {
    if (error.name === "AbortError") shown.wait("stopped");
    else shown.fail(error.message);
  } finally {
    running = null;
    at("send").textContent = "Send";
  }
  if (shown.text) turns.push({ role: "assistant", content: shown.text });
  else turns.pop();
}

async function streamed(shown) {
  const body = {
    messages: turns,
    stream: true,
    stream_options: { include_usage: true },
    max_completion_tokens: Number(at("most").value) || 256,
    temperature: Number(at("temperature").value),
    thinking: { type: at("think").checked ? "enabled" : "disabled" },
  };
  const answer = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(body),
    signal: running.signal,
  });
  if (answer.status === 401) askForToken();
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const decoder = new TextDecoder();
  const reader = answer.body.getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith(": queue position")) shown.wait(block.slice(2));
      if (block.startsWith("data: ") && block !== "data: [DONE]") shown.take(JSON.parse(block.slice(6)));
    }
  }
}

// An answer as it comes.
class Shown {
  constructor() {
    this.text = "";
    this.turn = made("div", "turn assistant");
    this.thought = made("details");
    this.thought.hidden = true;
    this.thought.append(made("summary", "", "thought"), made("span"));
    this.said = made("span");
    this.cost = made("div", "cost", "…");
    this.turn.append(this.thought, this.said, this.cost);
    at("talk").append(this.turn);
    this.scroll();
  }

  take(chunk) {
    if (chunk.error) { this.fail(chunk.error.message); return; }
    for (const choice of chunk.choices) {
      const delta = choice.delta;
      if (delta.reasoning_content) {
        this.thought.hidden = false;
        this.thought.lastChild.textContent += delta.reasoning_content;
      }
      if (delta.content) this.text += delta.content;
      this.said.textContent = this.text;
    }
    if (chunk.usage) this.settle(chunk.usage);
    this.scroll();
  }

  settle(usage) {
    const own = usage.headrace;
    this.cost.textContent =
      `${usage.completion_tokens} tokens after ${usage.prompt_tokens} ` +
      `(${usage.prompt_tokens_details.cached_tokens} cached), ` +
      `${rate(own.decode_tokens_per_second)} tokens/s, ${own.hits} hits, ${own.misses} misses, ` +
      `${bytes(own.bytes_read)} read`;
  }

  wait(text) { this.cost.textContent = text; }

  fail(text) {
    this.cost.textContent = text;
    this.cost.classList.add("error");
  }

  scroll() { at("talk").scrollTop = at("talk").scrollHeight; }
}

at("say").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const text = at("text").value.trim();
  if (!text) return;
  at("text").value = "";
  talk(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !running) {
    event.preventDefault();
    at("say").requestSubmit();
  }
});
at("fresh").addEventListener("click", () => {
  if (running) running.abort();
  turns.length = 0;
  at("talk").replaceChildren();
  at("text").focus();
});
at("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, at("token-text").value.trim());
  at("token-text").value = "";
  at("token").hidden = true;
});
look();
