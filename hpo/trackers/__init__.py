"""Send the evaluations of a run to experiment trackers, such as MLflow. Each tracker has its own process."""
