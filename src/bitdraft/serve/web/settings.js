// The settings form: what it asks for, and the server's defaults beside it.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

/** What the form asks for, as fields of a request. A seed is drawn where none is given, so that a run can be repeated. */
export function asked(form) {
  const body = {};
  for (const name of NUMBERS) {
    const field = form.elements[name];
    if (field.value !== "") body[name] = field.valueAsNumber;
  }
  body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  const speculative = { enabled: form.elements.speculate.checked };
  if (form.elements.k.value !== "") speculative.k = form.elements.k.valueAsNumber;
  body.speculative = speculative;
  return body;
}

/** The first field that does not hold what it should, with its message; null if all do. */
export function fault(form) {
  const field = [...form.elements].find((element) => !element.checkValidity());
  return field ? { field, words: `${field.labels[0].textContent.trim()}: ${field.validationMessage}` } : null;
}

/** Show the server's defaults where a field is empty. */
export function showDefaults(form, info) {
  const defaults = info.sampling_defaults;
  for (const name of NUMBERS) {
    if (defaults[name] != null) form.elements[name].placeholder = String(defaults[name]);
  }
  form.elements.max_tokens.placeholder = String(defaults.max_tokens ?? "what fits");
  form.elements.k.placeholder = String(info.speculative.max_draft);
  form.elements.k.max = String(Math.max(1, info.speculative.max_draft));
}
