// The figures of an answer, how they are counted and shown.

const SVG = "http://www.w3.org/2000/svg";
const MOST_BARS = 64;
const NONE = "\u2013";

/** What became of one answer while it came. */
export class Tally {
  constructor() {
    this.tokens = 0;
    this.origins = { draft: 0, corrected: 0, free: 0 };
    this.prompt = 0;
    this.cached = 0;
    this.steps = [];
    this.tested = 0;
    this.overlap = 0;
    this.started = performance.now();
    this.first = null;
    this.last = null;
    this.beforeRate = 0;
  }

  /** Take in a chunk of the stream. */
  add(event) {
    const choice = event.choices[0];
    const count = choice?.origins?.length ?? 0;
    for (const origin of choice?.origins ?? []) this.origins[origin] += 1;
    for (const step of choice?.steps ?? []) {
      this.steps.push(step);
      this.tested += step.tested;
      this.overlap += step.overlap;
    }
    if (count) {
      const now = (performance.now() - this.started) / 1000;
      if (this.first === null) {
        this.first = now;
        this.beforeRate = count;
      }
      this.last = now;
      this.tokens += count;
    }
    if (event.usage) {
      this.prompt = event.usage.prompt_tokens;
      this.cached = event.usage.prompt_tokens_details.cached_tokens;
    }
    if (event.metrics?.time_to_first_token != null) {
      this.first = event.metrics.time_to_first_token;
      this.last = event.metrics.time_to_last_token;
    }
  }

  /** Tokens a second after the first ones; null while there is no time between. */
  get rate() {
    const tokens = this.tokens - this.beforeRate;
    return tokens > 0 && this.last > this.first ? tokens / (this.last - this.first) : null;
  }

  get drafted() {
    return this.steps.reduce((sum, step) => sum + step.drafted, 0);
  }

  get accepted() {
    return this.steps.reduce((sum, step) => sum + step.accepted, 0);
  }
}

function fixed(value, digits) {
  return value === null ? NONE : value.toFixed(digits);
}

/** A rate for people: three digits. */
export function rateText(rate) {
  return rate === null ? NONE : rate >= 100 ? rate.toFixed(0) : rate >= 10 ? rate.toFixed(1) : rate.toFixed(2);
}

function set(id, text) {
  const element = document.getElementById(id);
  if (element.textContent !== text) element.textContent = text;
}

function bar(x, height, most, name) {
  const rect = document.createElementNS(SVG, "rect");
  const size = Math.max(height, 0.06 * most);
  for (const [key, value] of Object.entries({ x: x + 0.12, y: most - size, width: 0.76, height: size })) {
    rect.setAttribute(key, String(value));
  }
  rect.setAttribute("class", name);
  return rect;
}

function drawSteps(steps) {
  const shown = steps.slice(-MOST_BARS);
  const most = Math.max(1, ...shown.map((step) => step.drafted));
  const svg = document.getElementById("steps");
  svg.setAttribute("viewBox", `0 0 ${Math.max(32, shown.length)} ${most}`);
  svg.replaceChildren(
    ...shown.flatMap((step, x) =>
      step.drafted
        ? [bar(x, step.drafted, most, "drafted"), ...(step.accepted ? [bar(x, step.accepted, most, "stood")] : [])]
        : [bar(x, 0, most, "none")],
    ),
  );
  const drafted = steps.reduce((sum, step) => sum + step.drafted, 0);
  const words = steps.length
    ? `${steps.length} steps, mean ${(drafted / steps.length).toFixed(1)}, longest ${Math.max(...steps.map((s) => s.drafted))}`
    : "no steps yet";
  svg.setAttribute("aria-label", `Draft length of each step: ${words}`);
  set("steps-text", steps.length ? `${words}.` : "");
}

/** Show an answer's figures. */
export function showTally(tally) {
  set("speed", rateText(tally.rate));
  set("tokens", tally.tokens ? `${tally.tokens} after ${tally.prompt} of prompt` : NONE);
  set("first", tally.first === null ? NONE : `${tally.first.toFixed(2)} s`);
  for (const [origin, count] of Object.entries(tally.origins)) set(`count-${origin}`, String(count));
  set("count-cached", String(tally.cached));
  set("conditional", fixed(tally.tested ? tally.overlap / tally.tested : null, 3));
  const { drafted, accepted } = tally;
  set("accepted", fixed(drafted ? accepted / drafted : null, 3));
  set("accepted-of", drafted ? `${accepted} of ${drafted}` : "of all");
  drawSteps(tally.steps);
}

/** Show what the server holds now. */
export function showLoad(info) {
  const { load } = info;
  set("batch", `${load.running} of ${info.max_batch}`);
  set("waiting", String(load.waiting));
  set("kv", `${load.kv_blocks_used} of ${load.kv_blocks_total}`);
  set("kv-cached", String(load.cached_blocks));
  document.getElementById("kv-meter").value = load.kv_blocks_total ? load.kv_blocks_used / load.kv_blocks_total : 0;
  set("policy", info.draft ? `Draft length: ${info.speculative.draft_length}` : "");
}

/** A line of figures with a bar as long as its share of the fastest. */
function paceLine(name, rate, fastest) {
  const line = document.createElement("div");
  line.className = "pace";
  const label = document.createElement("span");
  label.textContent = name;
  const meter = document.createElement("meter");
  meter.max = fastest || 1;
  meter.value = rate ?? 0;
  meter.setAttribute("aria-hidden", "true");
  const value = document.createElement("b");
  value.textContent = rateText(rate);
  line.append(label, meter, value);
  return line;
}

function note(text, name = "") {
  const element = document.createElement("p");
  element.className = name;
  element.textContent = text;
  return element;
}

/** What the two answers have in common, in words, and whether that is as it has to be. */
export function verdict(draftIds, plainIds, greedy, stopped) {
  const same = draftIds.findIndex((id, at) => id !== plainIds[at]);
  const equal = same < 0 && (stopped || draftIds.length === plainIds.length);
  if (equal) {
    const words = stopped ? `Equal as far as it came: ${draftIds.length} tokens.` : `Equal: all ${draftIds.length} tokens.`;
    return { equal, words };
  }
  const at = same < 0 ? Math.min(draftIds.length, plainIds.length) : same;
  return {
    equal,
    words: greedy
      ? `Different from token ${at + 1} on. At temperature 0 this must not be: please report it.`
      : `Different from token ${at + 1} on. Above temperature 0 both are drawn from the same distribution, not from the same draws.`,
  };
}

/** Show a comparison. */
export function showComparison(result, drafted, plain, said) {
  const fastest = Math.max(drafted.rate ?? 0, plain.rate ?? 0);
  const ratio = drafted.rate && plain.rate ? drafted.rate / plain.rate : null;
  const large = note("", "large");
  const times = document.createElement("output");
  times.id = "ratio";
  times.textContent = ratio === null ? NONE : `${ratio.toFixed(2)}\u00d7`;
  const unit = document.createElement("span");
  unit.textContent = ratio === null ? "too short to measure" : "the speed of plain decoding";
  large.append(times, unit);
  const words = note(said.words, said.equal ? "equal" : "different");
  words.id = "equality";
  result.replaceChildren(
    large,
    paceLine("with draft", drafted.rate, fastest),
    paceLine("plain", plain.rate, fastest),
    words,
    note("One run of each, tokens/s after the first tokens, log-probabilities included.", "note"),
  );
}
