// Measures one prompt with plain decoding and with DFlash, replays both, and shows each verify pass.
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
    this.recordings = [];
    this.clear();
  }

  // The round of median speed.
  get recording() {
    const bySpeed = [...this.recordings].sort((a, b) => a.speed - b.speed);
    return bySpeed[Math.floor(bySpeed.length / 2)];
  }

  // Clears the display, not the recordings.
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
    this.figure("speed", this.recording.speed.toFixed(0));
  }

  // One step: the prefill's token, or the tokens of a verify pass.
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

// The answer to a request; an Error with the server's words where it refuses.
async function ask(path, options) {
  const headers = { "content-type": "application/json" };
  if (byId("key").value) headers.authorization = `Bearer ${byId("key").value}`;
  const response = await fetch(path, { headers, ...options });
  if (response.ok) return response;
  if (response.status === 401) byId("key-label").hidden = false;
  const answer = await response.json().catch(() => null);
  throw new Error(answer?.error?.message ?? `the server answered ${response.status}`);
}

async function fetchModel(signal) {
  const models = await (await ask("v1/models", { signal })).json();
  const model = models.data[0];
  byId("model").textContent = model.id;
  byId("target").textContent = model.root ?? "not named";
  byId("draft").textContent = model.draft_model ?? "not named";
  byId("names").hidden = false;
  byId("most").textContent = `0 (plain) to ${model.num_spec_tokens}`;
  byId("draft-length").max = model.num_spec_tokens;
  byId("draft-length").value ||= model.num_spec_tokens; // whole blocks
  return model;
}

// Fields that comparison and chat share.
function settings(model) {
  return {
    model: model.id,
    max_tokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    draft_length: byId("draft-length").valueAsNumber,
  };
}

// Records one answer: {steps: [[seconds since the first one, step]], speed: tokens per second}; shows its choices.
async function record(path, body, signal, show = () => {}) {
  const response = await ask(path, { method: "POST", body: JSON.stringify({ ...body, stream: true, return_steps: true }), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const recording = { steps: [], speed: 0 };
  let started = 0;
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
      for (const choice of chunk.choices) {
        show(choice);
        for (const step of choice.steps ?? []) {
          started ||= performance.now();
          recording.steps.push([(performance.now() - started) / 1000, step]);
        }
      }
      recording.speed = chunk.metrics?.tokens_per_second ?? recording.speed; // the server's, without the network
    }
  }
  return recording;
}

// They take turns, as concurrently they would slow each other, and so that a slow moment of the machine meets both.
const ROUND = 8; // pairs between two looks at the interval
const MEASURE_SECONDS = 20;

// The verdict on all pairs so far, by the rules of `dflash-trt try`.
async function judge(signal) {
  const timing = ({ steps, speed }) => {
    const count = steps.reduce((sum, [, step]) => sum + step.tokens.length, 0);
    return { tokens: count, seconds: count / speed };
  };
  const pairs = plain.recordings.map((each, i) => ({ plain: timing(each), dflash: timing(dflash.recordings[i]) }));
  const verified = dflash.recordings[0].steps.filter(([, step]) => !step.is_prefill);
  const emitted = verified.reduce((sum, [, step]) => sum + step.tokens.length, 0);
  const acceptance_length = verified.length ? emitted / verified.length : null;
  const body = JSON.stringify({ pairs, acceptance_length });
  return (await ask("paired-speed", { method: "POST", body, signal })).json();
}

async function compareDecoding(event) {
  event.preventDefault();
  const prompt = byId("prompt").value;
  const maxTokens = byId("max-tokens").valueAsNumber;
  controller = new AbortController();
  passes = [];
  byId("inspect").hidden = true;
  byId("replay").hidden = true;
  fail("");
  setRunning(true);
  plain.reset(prompt, maxTokens);
  dflash.reset(prompt, maxTokens);
  try {
    const model = await fetchModel(controller.signal);
    if (!byId("settings").reportValidity()) return setVerdict("", "");
    const body = { prompt, ...settings(model), seed: 1 }; // sampled: both draw the same tokens
    if (byId("regex").value) body.structured_outputs = { regex: byId("regex").value };
    const answer = (lane) => record(
      "v1/completions", lane.isDrafted ? body : { ...body, draft_length: 0 }, controller.signal,
    );
    setVerdict("Warming up", "");
    for (const lane of [plain, dflash]) await answer(lane);
    const started = performance.now();
    let judged = { is_narrow: false };
    let share = 0;
    while (!judged.is_narrow && share < 1) {
      setVerdict(`Measuring in turns, pair ${plain.recordings.length + 1}`, "");
      for (const lane of Math.random() < 0.5 ? [plain, dflash] : [dflash, plain]) lane.recordings.push(await answer(lane));
      share = (performance.now() - started) / 1000 / MEASURE_SECONDS;
      for (const lane of [plain, dflash]) lane.progress(share);
      if (plain.recordings.length % ROUND === 0 || share >= 1) judged = await judge(controller.signal);
    }
    for (const lane of [plain, dflash]) showRecording(lane);
    showVerdict(judged);
    const verdict = byId("verdict").textContent;
    keepRun("compare", "v1/completions", body, model, { verdict, plain: plain.recordings, dflash: dflash.recordings });
    if (showSteps()) {
      byId("replay").hidden = false;
      if (!matchMedia("(prefers-reduced-motion: reduce)").matches) await replay();
    }
  } catch (error) {
    setVerdict("", "");
    if (error.name !== "AbortError") fail(error.message);
  } finally {
    setRunning(false);
  }
}

function showRecording(lane) {
  lane.clear();
  for (const [seconds, step] of lane.recording.steps) lane.show(step, seconds);
  lane.finish();
}

// Both side by side, as measured; slowed down if the slower one took less than REPLAY_SECONDS.
const REPLAY_SECONDS = 5;

async function replay() {
  const longest = Math.max(...[plain, dflash].map((lane) => lane.recording.steps.at(-1)[0]));
  const slowed = Math.max(1, REPLAY_SECONDS / Math.max(longest, 0.001));
  const isOver = controller.signal;
  byId("replay").textContent = slowed > 1.5 ? `Replay, ${slowed.toFixed(0)} times slower` : "Replay";
  passes = [];
  for (const lane of [plain, dflash]) lane.clear();
  setRunning(true);
  const started = performance.now();
  const left = new Map([plain, dflash].map((lane) => [lane, [...lane.recording.steps]]));
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

function showVerdict(judged) {
  const isEqual = plain.ids.length === dflash.ids.length && plain.ids.every((id, i) => id === dflash.ids[i]);
  if (passes.length > 1 && passes.every((step) => step.proposals.length === 0)) {
    setVerdict("Nothing was drafted, so both decode plainly: the draft length is 0, here or at the server’s start.", "bad");
    return;
  }
  const work = `${dflash.ids.length} tokens in ${dflash.passes} forward passes of the target instead of ${plain.passes}`;
  const speed = judged.sentence[0].toUpperCase() + judged.sentence.slice(1);
  if (isEqual) setVerdict(`${speed}; same text: ${work}.`, judged.outcome === "faster" ? "good" : "slower");
  else setVerdict("The texts differ: the target is not batch invariant here, or decoding is not lossless.", "bad");
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
  for (const id of ["start", "replay", "send", "reset"]) byId(id).disabled = isRunning;
  for (const id of ["stop", "stop-chat"]) byId(id).disabled = !isRunning;
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
for (const id of ["stop", "stop-chat"]) byId(id).addEventListener("click", () => controller?.abort());
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

fetchModel().then(() => byId("ask").requestSubmit(), () => {}); // without a key it waits for one
