// `ai` over `@ai-sdk/gateway`. A job names the server, the package (ai, ai6, ai5), the model and the call.
import { answer, serve } from './client.mjs';

const ROOTS = { ai: '/v4/ai', ai6: '/v3/ai', ai5: '/v1/ai' };

await serve(async job => {
  const sdk = await import(job.sdk);
  const gateway = sdk.createGateway({ baseURL: job.url + ROOTS[job.sdk], apiKey: 'unused' });
  if (job.call === 'catalogue') {
    const { models } = await gateway.getAvailableModels();
    return { models, credits: await gateway.getCredits() };
  }
  return answer(sdk, gateway(job.model), job);
});
