"""Scale-out: a worker for NVIDIA Dynamo that answers from one dcut-trt server."""
