"""AWS Lambda and Alibaba Function Compute behind the provider port."""
