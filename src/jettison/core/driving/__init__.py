"""All groups together: requests to groups, every group's steps, requests without a group, fast-forward."""
