// `ai` over `@ai-sdk/openai-compatible`. A job names the server, the model and the call.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import * as sdk from 'ai';
import { answer, serve } from './client.mjs';

await serve(job => {
  const provider = createOpenAICompatible({
    name: 'headrace',
    baseURL: `${job.url}/v1`,
    apiKey: 'unused',
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
  return answer(sdk, provider(job.model), job);
});
