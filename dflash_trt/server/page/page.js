// Streams one prompt with plain decoding and with DFlash, shows each verify pass, and replays both.
"use strict";

const byId = (id) => document.getElementById(id);
const visible = (text) => text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
let controller = null;
let passes = []; // verify passes of DFlash: {proposals, num_accepted, tokens}

class Lane {
  constructor(id, isDrafted) {
    this.root = byId(id);
    this.text = this.root.querySelector(".text");
    this.isDrafted = isDrafted;
  }

  reset(prompt, maxTokens) {
    this.prompt = prompt;
    this.maxTokens = maxTokens;
    this.measured = null; // tokens per second
    this.record = []; // [seconds since the first step, step]
    this.clear();
  }

  // Clears the display, not the recording.
  clear() {
    this.ids = [];
    this.passes = 0;
    this.emitted = 0; // tokens of verify passes, without prefill's
    this.text.replaceChildren(element("span", "prompt", this.prompt));
    for (const name of ["speed", "tokens", "passes", "tau"]) this.figure(name, "–");
    this.progress(0);
  }

  figure(name, value) {
    const place = this.root.querySelector(`[data-figure="${name}"]`);
    if (place) place.textContent = value;
  }

  progress(share) {
    this.root.querySelector(".progress i").style.width = `${Math.min(100, share * 100)}%`;
  }

  // The server's own measurement, without network and rendering.
  finish() {
    this.progress(1);
    if (this.measured) this.figure("speed", this.measured.toFixed(0));
  }

  // One step: the prefill's token, or the tokens of a verify pass.
  receive(step) {
    const now = performance.now();
    if (this.record.length === 0) this.started = now;
    const seconds = (now - this.started) / 1000;
    this.record.push([seconds, step]);
    this.show(step, seconds);
  }

  show(step, seconds) {
    const stays = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 8;
    this.ids.push(...step.tokens.map((token) => token.id));
    if (!step.is_prefill) {
      this.passes += 1;
      this.emitted += step.tokens.length;
    }
    this.text.append(this.isDrafted && !step.is_prefill ? this.band(step) : tokens(step.tokens));
    if (seconds > 0 && this.emitted > 0) this.figure("speed", (this.emitted / seconds).toFixed(0));
    this.figure("tokens", this.ids.length);
    this.figure("passes", this.passes);
    if (this.passes > 0) this.figure("tau", (this.emitted / this.passes).toFixed(2));
    this.progress(this.ids.length / this.maxTokens);
    if (stays) this.text.scrollTop = this.text.scrollHeight;
  }

  band(step) {
    const index = passes.push(step) - 1;
    const band = element("span", `step${index % 2 ? " odd" : ""}`);
    band.dataset.index = index;
    const accepted = step.tokens.slice(0, step.num_accepted);
    const bonus = step.tokens.slice(step.num_accepted);
    band.append(tokens(accepted));
    for (const token of bonus) band.append(element("span", token.text.trim() ? "bonus" : "", token.text));
    for (const token of step.proposals.slice(step.num_accepted)) {
      band.append(element("span", "rejected", visible(token.text)));
    }
    band.title = `pass ${index + 1}: ${step.num_accepted} of ${step.proposals.length} draft tokens accepted`;
    band.addEventListener("click", () => choose(index));
    return band;
  }
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function tokens(list) {
  return document.createTextNode(list.map((token) => token.text).join(""));
}

const plain = new Lane("plain", false);
const dflash = new Lane("dflash", true);

// Streams one completion into `lane`, step by step.
async function stream(lane, body, signal) {
  const headers = { "content-type": "application/json" };
  if (byId("key").value) headers.authorization = `Bearer ${byId("key").value}`;
  const response = await fetch("v1/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) {
    if (response.status === 401) byId("key-label").hidden = false;
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? `the server answered ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.startsWith("data: ") ? event.slice(6) : "";
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) for (const step of choice.steps ?? []) lane.receive(step);
      lane.measured = chunk.metrics?.tokens_per_second ?? lane.measured;
    }
  }
  lane.finish();
}

async function compareDecoding(event) {
  event.preventDefault();
  const prompt = byId("prompt").value;
  const body = {
    model: byId("model").textContent || undefined,
    prompt,
    max_tokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    seed: 1, // sampled: both draw the same tokens
    stream: true,
    return_steps: true,
  };
  controller = new AbortController();
  passes = [];
  byId("inspect").hidden = true;
  byId("replay").hidden = true;
  setVerdict("", "");
  fail("");
  setRunning(true);
  plain.reset(prompt, body.max_tokens);
  dflash.reset(prompt, body.max_tokens);
  try {
    // One after the other: concurrently, they would share the machine and slow each other.
    await stream(dflash, body, controller.signal);
    const isDone = showSteps();
    await stream(plain, { ...body, draft_length: 0 }, controller.signal);
    if (isDone) {
      showVerdict();
      byId("replay").hidden = false;
      if (!matchMedia("(prefers-reduced-motion: reduce)").matches) await replay();
    }
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
    showSteps();
  } finally {
    setRunning(false);
  }
}

// Both side by side, as measured; slowed down if the slower one took less than REPLAY_SECONDS.
const REPLAY_SECONDS = 5;

async function replay() {
  const longest = Math.max(...[plain, dflash].map((lane) => lane.record.at(-1)[0]));
  const slowed = Math.max(1, REPLAY_SECONDS / Math.max(longest, 0.001));
  const isOver = controller.signal;
  byId("replay").textContent = slowed > 1.5 ? `Replay, ${slowed.toFixed(0)} times slower` : "Replay";
  passes = [];
  for (const lane of [plain, dflash]) lane.clear();
  setRunning(true);
  const started = performance.now();
  const left = new Map([[plain, [...plain.record]], [dflash, [...dflash.record]]]);
  while ([...left.values()].some((steps) => steps.length > 0)) {
    const now = isOver.aborted ? Infinity : (performance.now() - started) / 1000 / slowed;
    for (const [lane, steps] of left) {
      while (steps.length > 0 && steps[0][0] <= now) {
        const [seconds, step] = steps.shift();
        lane.show(step, seconds);
      }
      if (steps.length === 0) lane.finish();
    }
    await new Promise(requestAnimationFrame);
  }
  setRunning(false);
  choose(Number(byId("scrubber").value), false);
}

function showVerdict() {
  const isEqual = plain.ids.length === dflash.ids.length && plain.ids.every((id, i) => id === dflash.ids[i]);
  const ratio = plain.passes ? (plain.passes / Math.max(1, dflash.passes)).toFixed(2) : "–";
  setVerdict(
    isEqual ? `Identical: ${dflash.ids.length} tokens in ${dflash.passes} forward passes of the target instead of ${plain.passes} (${ratio} times fewer).`
      : "The outputs differ: the target is not batch invariant here, or decoding is not lossless.",
    isEqual ? "good" : "bad",
  );
}

function setVerdict(text, className) {
  byId("verdict").textContent = text;
  byId("verdict").className = className;
}

function fail(message) {
  byId("error").textContent = message;
  byId("error").hidden = !message;
}

function setRunning(isRunning) {
  byId("start").disabled = isRunning;
  byId("replay").disabled = isRunning;
  byId("stop").disabled = !isRunning;
}

function showSteps() {
  if (passes.length === 0) return false;
  byId("inspect").hidden = false;
  byId("scrubber").max = passes.length - 1;
  showBars();
  choose(0, false);
  return true;
}

// Draft, verify, accept and commit of one pass.
function choose(index, scrolls = true) {
  if (passes.length === 0 || byId("inspect").hidden) return;
  const chosen = Math.max(0, Math.min(index, passes.length - 1));
  const step = passes[chosen];
  byId("scrubber").value = chosen;
  byId("position").textContent = `pass ${chosen + 1} of ${passes.length}`;
  const before = chosen > 0 ? passes[chosen - 1].tokens.at(-1) : null;
  const anchor = chip(before ? before.text : "first token", "anchor");
  const bonus = step.tokens.slice(step.num_accepted);
  const rejected = step.proposals.slice(step.num_accepted);
  stage("draft", [anchor, ...step.proposals.map((token) => chip(token.text))]);
  stage("verify", [note(`the target scores all ${step.proposals.length + 1} positions in one forward pass`)]);
  stage("accept", [
    ...step.proposals.map((token, i) => chip(token.text, i < step.num_accepted ? "accepted" : "rejected-chip")),
    ...bonus.map((token) => chip(token.text, "bonus-chip")),
    note(bonus.length ? "the last is the bonus token, sampled by the target" : "generation ended here"),
  ]);
  stage("commit", [note(
    `${rejected.length ? `${rejected.length} rolled back, ` : ""}K/V of ${step.num_accepted + 1} injected into the drafter’s context`,
  )]);
  for (const band of document.querySelectorAll(".step")) {
    const isChosen = Number(band.dataset.index) === chosen;
    band.classList.toggle("chosen", isChosen);
    if (isChosen && scrolls) band.scrollIntoView({ block: "nearest" });
  }
}

function stage(name, children) {
  document.querySelector(`[data-stage="${name}"] .tokens`).replaceChildren(...children);
}

const chip = (text, className = "") => element("span", `chip ${className}`, visible(text));
const note = (text) => element("span", "note", text);

function showBars() {
  const longest = Math.max(...passes.map((step) => step.proposals.length));
  const bars = [];
  for (let position = 1; position <= longest; position += 1) {
    const verified = passes.filter((step) => step.proposals.length >= position);
    const share = verified.filter((step) => step.num_accepted >= position).length / verified.length;
    const bar = element("div", "bar");
    const block = element("i");
    block.style.height = `${Math.round(share * 100)}px`;
    bar.append(element("span", "", `${Math.round(share * 100)} %`), block, element("span", "", String(position)));
    bars.push(bar);
  }
  byId("bars").replaceChildren(...bars);
}

byId("ask").addEventListener("submit", compareDecoding);
byId("stop").addEventListener("click", () => controller?.abort());
byId("replay").addEventListener("click", () => {
  controller = new AbortController();
  replay();
});
byId("scrubber").addEventListener("input", (event) => choose(event.target.valueAsNumber));
byId("previous").addEventListener("click", () => choose(Number(byId("scrubber").value) - 1));
byId("next").addEventListener("click", () => choose(Number(byId("scrubber").value) + 1));
byId("show-rejected").addEventListener("change", (event) => {
  dflash.text.classList.toggle("show-rejected", event.target.checked);
});

fetch("v1/models")
  .then((response) => (response.ok ? response.json() : Promise.reject(response)))
  .then((models) => { byId("model").textContent = models.data[0].id; })
  .catch((response) => { byId("key-label").hidden = response.status !== 401; });
