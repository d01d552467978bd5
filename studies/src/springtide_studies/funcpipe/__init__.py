"""`bench funcpipe` and `bench pipeline-plan`: FuncPipe's figures."""
