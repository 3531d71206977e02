// `ai` over `@ai-sdk/openai-compatible`: node openai_compatible.mjs URL JOB, where the job names the call.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import * as sdk from 'ai';
import { answer, print } from './client.mjs';

const [url, text] = process.argv.slice(2);
const job = JSON.parse(text);
const provider = createOpenAICompatible({
  name: 'headrace',
  baseURL: `${url}/v1`,
  apiKey: 'unused',
  includeUsage: true,
  supportsStructuredOutputs: true,
});
print(await answer(sdk, provider(job.model), job));
