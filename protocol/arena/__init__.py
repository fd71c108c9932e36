"""The layout of the shared memory and the handing over of its descriptor."""
