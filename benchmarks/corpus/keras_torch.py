"""Keras on torch: compile and fit, as its documentation writes it."""

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
from digest import digest

keras.utils.set_random_seed(0)
model = keras.Sequential([
    keras.Input((28, 28, 1)),
    keras.layers.Conv2D(32, 3, activation="relu"),
    keras.layers.Conv2D(32, 3, activation="relu"),
    keras.layers.MaxPooling2D(2),
    keras.layers.Conv2D(64, 3, activation="relu"),
    keras.layers.Flatten(),
    keras.layers.Dropout(0.5),
    keras.layers.Dense(10, activation="softmax"),
])
model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])


class Told(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print(batch, logs["loss"], flush=True)


rng = np.random.default_rng(0)
x, y = rng.random((1536, 28, 28, 1), dtype=np.float32), rng.integers(0, 10, 1536)
model.fit(x, y, batch_size=128, epochs=1, verbose=0, callbacks=[Told()])
print(digest(model))
