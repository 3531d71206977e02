// `ai` over `@ai-sdk/gateway`: node gateway.mjs URL JOB, where the job names the package (ai, ai6, ai5) and the call.
import { answer, print } from './client.mjs';

const ROOTS = { ai: '/v4/ai', ai6: '/v3/ai', ai5: '/v1/ai' };
const [url, text] = process.argv.slice(2);
const job = JSON.parse(text);
const sdk = await import(job.sdk);
const gateway = sdk.createGateway({ baseURL: url + ROOTS[job.sdk], apiKey: 'unused' });

if (job.call === 'catalogue') {
  const { models } = await gateway.getAvailableModels();
  print({ models, credits: await gateway.getCredits() });
} else {
  print(await answer(sdk, gateway(job.model), job));
}
