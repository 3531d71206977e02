// What both programs do with a model of the AI SDK: one call as a job says, and everything it told, as JSON.
import { createInterface } from 'node:readline';

const TOOLS = {
  weather: {
    description: 'The weather in a city',
    schema: {
      type: 'object',
      properties: { city: { type: 'string' } },
      required: ['city'],
      additionalProperties: false,
    },
    execute: async ({ city }) => ({ city, degrees: 21 }),
  },
  broken: {
    description: 'Always fails',
    schema: { type: 'object', properties: {} },
    execute: async () => {
      throw new Error('out of order');
    },
  },
};

function tools(sdk, names) {
  const made = {};
  for (const name of names) {
    const { description, schema, execute } = TOOLS[name];
    made[name] = sdk.tool({ description, inputSchema: sdk.jsonSchema(schema), execute });
  }
  return made;
}

function content(part) {
  if (part.type === 'file' && part.base64) {
    return { type: 'file', mediaType: part.mediaType, data: Buffer.from(part.base64, 'base64') };
  }
  return part;
}

function settings(sdk, model, job) {
  const out = { model, maxRetries: 0, ...job.settings };
  if (job.prompt) out.prompt = job.prompt;
  if (job.messages) {
    out.messages = job.messages.map(message =>
      Array.isArray(message.content) ? { ...message, content: message.content.map(content) } : message,
    );
  }
  if (job.tools) {
    out.tools = tools(sdk, job.tools);
    out.stopWhen = sdk.stepCountIs(job.maxSteps ?? 4);
  }
  if (job.schema) {
    const output = { schema: sdk.jsonSchema(job.schema) };
    const made = sdk.Output.object(output);
    if (job.legacyOutput) out.experimental_output = made;
    else out.output = made;
  }
  return out;
}

function failed(error) {
  const last = error.lastError ?? error;
  const said = { name: last.name, message: last.message };
  for (const key of ['type', 'statusCode', 'isRetryable', 'code', 'modelId']) {
    if (last[key] !== undefined) said[key] = last[key];
  }
  return said;
}

const plain = value => (value === undefined ? null : JSON.parse(JSON.stringify(value)));

function stepped(step) {
  return {
    text: step.text,
    reasoning: step.reasoningText ?? null,
    said: step.content.filter(({ type }) => type !== 'tool-result').map(({ type, text, input }) => [type, plain(text ?? input)]),
    calls: step.toolCalls.map(({ toolName, toolCallId, input }) => ({ toolName, toolCallId, input: plain(input) })),
    results: step.toolResults.map(({ toolName, output }) => ({ toolName, output: plain(output) })),
    finishReason: step.finishReason,
    rawFinishReason: step.rawFinishReason ?? null,
    usage: plain(step.usage),
    warnings: plain(step.warnings),
  };
}

async function generated(sdk, model, job) {
  const result = await sdk.generateText(settings(sdk, model, job));
  const out = { steps: result.steps.map(stepped) };
  if (job.schema) out.output = plain(job.legacyOutput ? result.experimental_output : result.output);
  return out;
}

async function streamed(sdk, model, job) {
  const controller = new AbortController();
  const errors = [];
  const result = sdk.streamText({
    ...settings(sdk, model, job),
    abortSignal: controller.signal,
    onError: ({ error }) => errors.push(failed(error)),
  });
  const parts = [];
  let text = '';
  for await (const part of result.fullStream) {
    parts.push(part.type);
    if (part.type === 'text-delta') text += part.text;
    if (job.abortAfter && text.length >= job.abortAfter) controller.abort();
  }
  const out = { parts, text, errors };
  if (!job.abortAfter && errors.length === 0) out.steps = (await result.steps).map(stepped);
  if (out.steps && job.schema) out.output = plain(await result.output);
  return out;
}

async function object(sdk, model, job) {
  const result = await sdk.generateObject({ ...settings(sdk, model, { ...job, schema: null }), schema: sdk.jsonSchema(job.schema) });
  return { object: result.object, finishReason: result.finishReason };
}

const CALLS = { generateText: generated, streamText: streamed, generateObject: object };

export async function answer(sdk, model, job) {
  globalThis.AI_SDK_LOG_WARNINGS = false;
  try {
    return await CALLS[job.call](sdk, model, job);
  } catch (error) {
    return { error: failed(error) };
  }
}

export async function serve(respond) {
  for await (const line of createInterface({ input: process.stdin })) {
    process.stdout.write(`${JSON.stringify(await respond(JSON.parse(line)))}\n`);
  }
}
