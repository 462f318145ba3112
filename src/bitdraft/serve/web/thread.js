// The conversation: turns of the user and of the model.

import { post } from "./api.js";
import { Aligner, Writer } from "./tokens.js";

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function turn(thread, className, who) {
  const article = element("article", `turn ${className}`);
  article.append(element("h3", "who", who));
  thread.append(article);
  return article;
}

/** Add what the user said. */
export function addUser(thread, text) {
  turn(thread, "user", "You").append(element("p", "text", text));
}

/** Say under a turn what went wrong, with a button that tries again. */
export function addFault(article, words, again) {
  const box = element("div", "fault");
  box.setAttribute("role", "alert");
  const button = element("button", "", "Try again");
  button.type = "button";
  button.addEventListener("click", () => {
    button.disabled = true;
    again();
  });
  box.append(element("p", "", words), button);
  article.append(box);
}

/**
 * Add an answer that is about to come.
 * @param who the model's name
 * @param messages what is answered, for the view of the prompt
 * @returns {article, content, add(choice), end(tally, remark)}; content is the text for the next turn
 */
export function addAnswer(thread, who, messages) {
  const article = turn(thread, "model", who);
  const text = element("div", "text");
  text.tabIndex = 0;
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", "Answer. Arrow keys go from token to token.");
  text.setAttribute("aria-busy", "true");
  text.tokens = [];
  article.append(text);
  const aligner = new Aligner();
  const writer = new Writer(text);

  function take(texts, tokens, last) {
    for (const piece of aligner.push(texts, tokens, last)) {
      const token = piece.tokens.at(-1);
      const index = token ? text.tokens.length : null;
      if (token) {
        text.tokens.push({
          text: token.token,
          origin: token.origin,
          logprob: token.logprob,
          others: token.top_logprobs,
          parts: piece.tokens.length,
        });
      }
      writer.write(piece.text, piece.kind, token?.origin ?? "", index);
      if (piece.kind === "content") view.content += piece.text;
    }
  }

  const view = {
    article,
    content: "",
    add(choice) {
      const { reasoning_content: reasoning, content } = choice.delta;
      const texts = [["reasoning", reasoning], ["content", content]].filter(([, part]) => part);
      const tokens = (choice.logprobs?.content ?? []).map((entry, at) => ({ ...entry, origin: choice.origins?.[at] ?? "free" }));
      take(texts, tokens, false);
    },
    end(tally, remark) {
      take([], [], true);
      text.removeAttribute("aria-busy");
      article.append(footer(tally, remark, messages));
    },
  };
  return view;
}

function footer(tally, remark, messages) {
  const foot = element("footer", "");
  if (remark) foot.append(element("p", "remark", remark));
  if (!tally.prompt) return foot;
  const details = element("details", "");
  details.append(element("summary", "", `Prompt: ${tally.prompt} tokens, ${tally.cached} of them cached`));
  const shown = element("p", "prompt-text");
  details.append(shown);
  details.addEventListener("toggle", () => showPrompt(shown, tally, messages), { once: true });
  foot.append(details);
  return foot;
}

/** The prompt as the model reads it, token by token. */
async function showPrompt(shown, tally, messages) {
  try {
    const { token_strs: texts } = await post("tokenize", { messages, return_token_strs: true });
    shown.tokens = texts.map((text, at) => ({ text, origin: at < tally.cached ? "cached" : "prompt", parts: 1 }));
    shown.append(
      ...texts.map((text, at) => {
        const span = element("span", `tok ${at < tally.cached ? "cached" : "prompt"}`, text);
        span.dataset.token = String(at);
        return span;
      }),
    );
  } catch (error) {
    shown.textContent = error.message;
  }
}
