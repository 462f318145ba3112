// What is known of a token, shown beside it: by pointer, or by arrow keys in a focused answer.

const MEANING = {
  draft: "proposed by the draft, accepted by the target",
  corrected: "the target's, in place of a drafted token that it refused",
  free: "the target's own",
  cached: "of the prompt, known from before",
  prompt: "of the prompt, read for this answer",
};
const SPACES = { " ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5" };

/** A token's text with its spaces made visible. */
export function visible(text) {
  return text.replace(/[ \n\t]/g, (space) => SPACES[space]);
}

/** A log-probability and the probability it stands for. */
function chance(logprob) {
  const share = 100 * Math.exp(logprob);
  const percent = share >= 0.1 ? `${share.toFixed(1)} %` : "below 0.1 %";
  return `${logprob.toFixed(3).replace("-0.000", "0.000")} (${percent})`;
}

function lines(token) {
  const found = [
    ["name", visible(token.text)],
    ["origin", `${token.origin}: ${MEANING[token.origin]}`],
  ];
  if (token.logprob !== undefined) {
    found.push(["logprob", `log-probability ${chance(token.logprob)}`]);
  }
  for (const other of token.others ?? []) {
    if (other.token !== token.text) {
      found.push(["other", `instead: ${visible(other.token)} ${chance(other.logprob)}`]);
    }
  }
  if (token.parts > 1) found.push(["other", `a character written by ${token.parts} tokens; this is the last one`]);
  return found;
}

/**
 * Show tips for the tokens in `thread`.
 * @param find (element) => the token that a span shows, or null
 */
export function inspect(thread, tip, announce, find) {
  let here = null;

  function hide() {
    here?.classList.remove("here");
    here = null;
    tip.hidden = true;
  }

  function show(span) {
    const token = find(span);
    if (!token) return null;
    hide();
    here = span;
    span.classList.add("here");
    const said = lines(token);
    tip.replaceChildren(
      ...said.map(([name, text]) => {
        const line = document.createElement("p");
        line.className = name;
        line.textContent = text;
        return line;
      }),
    );
    tip.hidden = false;
    const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left), innerWidth - tip.offsetWidth - 8);
    const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
    return said;
  }

  thread.addEventListener("pointerover", (event) => {
    const span = event.target.closest("[data-token]");
    if (span) show(span);
    else hide();
  });
  thread.addEventListener("pointerleave", hide);
  thread.addEventListener("focusout", hide);
  thread.addEventListener("keydown", (event) => {
    const text = event.target.closest(".text[tabindex]");
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!text || !way) return;
    event.preventDefault();
    const spans = [...text.querySelectorAll("[data-token]")];
    if (!spans.length) return;
    const at = here && text.contains(here) ? spans.indexOf(here) + way : way > 0 ? 0 : spans.length - 1;
    const span = spans[Math.min(Math.max(at, 0), spans.length - 1)];
    span.scrollIntoView({ block: "nearest" });
    const said = show(span);
    if (said) announce(said.map(([, words]) => words).join(". "));
  });
  addEventListener("scroll", hide, { capture: true, passive: true });
  return {
    hide,
    get shown() {
      return !tip.hidden;
    },
  };
}
