"""The Open Inference Protocol over gRPC, in a process of its own that passes every call on to the gateway by HTTP."""
