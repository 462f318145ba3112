// A chat with the served model, and a look at how its answers come to be.

import { ServerError, events, get, keepKey } from "./api.js";
import { Tally, showComparison, showLoad, showTally, verdict } from "./figures.js";
import { inspect } from "./inspect.js";
import { asked, fault, showDefaults } from "./settings.js";
import { addAnswer, addFault, addUser } from "./thread.js";

const BUSY_POLL = 2000;
const IDLE_POLL = 15000;
const PLAINLY = "This server decodes plainly: it was started without a draft, so every token is the target's own.";
const $ = (id) => document.getElementById(id);

const state = { info: null, messages: [], running: null, last: null, timer: 0 };

const tip = inspect($("thread"), $("tip"), announce, (span) => {
  const tokens = span.closest(".text, .prompt-text")?.tokens;
  return tokens?.[Number(span.dataset.token)] ?? null;
});

function announce(words) {
  $("status").textContent = words;
}

// The server

function askForKey(words) {
  if (words) $("key-text").textContent = words;
  if ($("key-dialog").open) return;
  $("key-dialog").returnValue = "";
  $("key-dialog").showModal();
}

function explain(error) {
  if (error instanceof ServerError && error.status === 401) {
    askForKey(state.info ? "The key was refused. Give another one." : "");
  }
  return error instanceof ServerError ? error.message : `The page failed: ${error.message}`;
}

function describe(info) {
  const { target, draft } = info;
  const name = (model) => [model.name, model.format].filter(Boolean).join(" ");
  $("model").textContent = draft ? `${name(target)}, drafted by ${name(draft)}` : name(target);
  document.title = `${info.models[0]} \u00b7 bitdraft`;
  document.body.classList.toggle("plain", !draft);
  $("plainly").hidden = Boolean(draft);
  $("plainly").textContent = draft ? "" : PLAINLY;
  if (!draft) {
    $("empty-title").textContent = `Talk to ${info.models[0]}.`;
    $("empty-text").textContent = PLAINLY;
  }
}

async function poll() {
  clearTimeout(state.timer);
  if (!document.hidden) {
    try {
      const first = !state.info;
      state.info = await get("info");
      if (first) {
        describe(state.info);
        showDefaults($("settings"), state.info);
      }
      showLoad(state.info);
    } catch (error) {
      const words = explain(error);
      if (!state.info) $("model").textContent = words;
    }
  }
  clearTimeout(state.timer);
  if (!$("key-dialog").open) state.timer = setTimeout(poll, state.running ? BUSY_POLL : IDLE_POLL);
}

// Answers

function begin() {
  state.running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  $("compare").disabled = true;
  poll();
  return state.running.signal;
}

function end() {
  const wasOnStop = document.activeElement === $("stop");
  state.running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  if (wasOnStop) $("prompt").focus();
  const { last } = state;
  $("compare").disabled = !(last?.tally.tokens && last.body.speculative.enabled && state.info?.draft);
  poll();
}

function painter(tally) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      if (state.last?.tally === tally) showTally(tally);
    });
  };
}

/** Stream an answer to `body`; `show` gets each chunk. Returns the finish reason. */
async function follow(body, tally, signal, show) {
  let finish = null;
  for await (const event of events("v1/chat/completions", body, signal)) {
    tally.add(event);
    const choice = event.choices[0];
    if (choice) show(choice);
    finish = choice?.finish_reason ?? finish;
  }
  return finish;
}

async function answer() {
  const system = $("system").value.trim();
  const chat = state.messages;
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...chat];
  const body = {
    messages,
    ...asked($("settings")),
    logprobs: true,
    top_logprobs: 3,
    return_origins: true,
    return_token_ids: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  const tally = new Tally();
  const view = addAnswer($("thread"), state.info?.models[0] ?? "model", messages);
  const last = { body, tally, ids: [], stopped: false };
  state.last = last;
  $("result").replaceChildren();
  const paint = painter(tally);
  const signal = begin();
  announce("Answering");
  try {
    const finish = await follow(body, tally, signal, (choice) => {
      last.ids.push(...(choice.token_ids ?? []));
      view.add(choice);
      keepInSight();
      paint();
    });
    view.end(tally, finish === "length" ? "ended by the limit on tokens" : "");
    announce(`Answer complete, ${tally.tokens} tokens`);
  } catch (error) {
    last.stopped = true;
    if (error.name === "AbortError") {
      view.end(tally, "stopped");
      announce("Stopped");
    } else {
      view.end(tally, "");
      addFault(view.article, explain(error), again);
    }
  }
  if (view.content) chat.push({ role: "assistant", content: view.content });
  if (state.last === last) showTally(tally);
  end();
  keepInSight();
}

/** After an error: the same message again. */
function again() {
  if (state.running) return;
  if (state.messages.at(-1)?.role === "assistant") state.messages.pop();
  answer();
}

async function compare() {
  const { body, tally, ids, stopped } = state.last;
  const plain = new Tally();
  const plainIds = [];
  const limit = stopped ? { max_tokens: ids.length } : {};
  $("result").replaceChildren();
  const words = document.createElement("p");
  words.className = "note";
  $("result").append(words);
  const signal = begin();
  try {
    await follow({ ...body, ...limit, speculative: { enabled: false } }, plain, signal, (choice) => {
      plainIds.push(...(choice.token_ids ?? []));
      words.textContent = `Decoding plainly: ${plain.tokens} of ${tally.tokens} tokens`;
    });
    const greedy = (body.temperature ?? state.info.sampling_defaults.temperature) === 0;
    showComparison($("result"), tally, plain, verdict(ids, plainIds, greedy, stopped));
  } catch (error) {
    words.textContent = error.name === "AbortError" ? "The comparison was stopped." : explain(error);
  }
  end();
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || state.running) return;
  const wrong = fault($("settings"));
  if (wrong) {
    announce(wrong.words);
    showPanel(true);
    wrong.field.reportValidity();
    return;
  }
  $("empty").hidden = true;
  $("prompt").value = "";
  fit();
  if (state.messages.at(-1)?.role === "user") state.messages.pop(); // it was never answered
  state.messages.push({ role: "user", content: text });
  addUser($("thread"), text);
  $("scroll").scrollTop = $("scroll").scrollHeight;
  answer();
}

function stop() {
  state.running?.abort();
}

function newChat() {
  stop();
  state.messages = [];
  state.last = null;
  $("thread").replaceChildren();
  $("result").replaceChildren();
  $("empty").hidden = false;
  $("compare").disabled = true;
  showTally(new Tally());
  $("prompt").focus();
}

// The page

function keepInSight() {
  const box = $("scroll");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}

function fit() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight / 3)}px`;
}

function showPanel(open) {
  document.body.classList.toggle("panel-open", open);
  $("show-panel").setAttribute("aria-expanded", String(open));
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function labelTheme() {
  const next = isDark() ? "light" : "dark";
  $("theme").textContent = next === "dark" ? "Dark" : "Light";
  $("theme").setAttribute("aria-label", `Switch to the ${next} theme`);
}

function switchTheme() {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("bitdraft.theme", next);
  } catch {
    // storage is switched off: it lasts as long as the page
  }
  labelTheme();
}

function onKey(event) {
  if ($("key-dialog").open || event.isComposing) return;
  const typing = event.target.closest("input, textarea, select");
  if (event.key === "Escape") {
    if (state.running) stop();
    else if (tip.shown) tip.hide();
    else if (document.body.classList.contains("panel-open")) showPanel(false);
  } else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    $("prompt").focus();
  }
}

$("prompt").addEventListener("input", fit);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("stop").addEventListener("click", stop);
$("compare").addEventListener("click", compare);
$("new-chat").addEventListener("click", newChat);
$("theme").addEventListener("click", switchTheme);
$("show-panel").addEventListener("click", () => showPanel(!document.body.classList.contains("panel-open")));
$("marks").addEventListener("change", (event) => document.body.classList.toggle("unmarked", !event.target.checked));
$("examples").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  $("prompt").value = button.textContent;
  send();
});
$("key-form").addEventListener("submit", () => {
  keepKey($("key").value);
  $("key").value = "";
});
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue === "given") poll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", labelTheme);
document.addEventListener("visibilitychange", poll);
document.addEventListener("keydown", onKey);

labelTheme();
showTally(new Tally());
poll();
$("prompt").focus();
