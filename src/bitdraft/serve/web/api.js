// The server: requests with the key, errors in words, streams of events.

const KEY = "bitdraft.key";
const ROOT = new URL("../", import.meta.url);

/** Something that the server, or its absence, has to say to the user. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let memory = null;

/** The key of this tab; null for none. */
function key() {
  try {
    return sessionStorage.getItem(KEY) ?? memory;
  } catch {
    return memory;
  }
}

/** Keep a key until the tab is closed. */
export function keepKey(value) {
  memory = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // storage is switched off: memory has it
  }
}

async function call(path, { body, signal } = {}) {
  const headers = {};
  const shown = key();
  if (shown) headers.authorization = `Bearer ${shown}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. It may have stopped.");
  }
  if (!answer.ok) throw await explained(answer);
  return answer;
}

async function explained(answer) {
  let said = "";
  try {
    said = (await answer.json()).error.message;
  } catch {
    // no JSON, or not the server's: the status has to do
  }
  const wait = answer.headers.get("retry-after");
  const words = {
    401: "The server asks for another key.",
    413: "The message is too long for the server.",
    429: `The server is busy${wait ? `; try again in ${wait} s` : ""}.`,
    503: "The server is stopping.",
  };
  const opening = words[answer.status] ?? `The server answered with status ${answer.status}.`;
  return new ServerError([opening, said].filter(Boolean).join(" "), answer.status);
}

/** The JSON at a path. */
export async function get(path, signal) {
  return (await call(path, { signal })).json();
}

/** The JSON that a path answers a body with. */
export async function post(path, body, signal) {
  return (await call(path, { body, signal })).json();
}

/** The events of a streamed answer, as they come. */
export async function* events(path, body, signal) {
  const answer = await call(path, { body: { ...body, stream: true }, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The connection to the server broke off.");
    }
    if (part.done) throw new ServerError("The answer broke off before its end.");
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message);
      yield event;
    }
  }
}
