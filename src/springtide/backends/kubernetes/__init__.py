"""The executor on Kubernetes: replicas are pods, devices are extended resources, pools are labels of nodes."""
