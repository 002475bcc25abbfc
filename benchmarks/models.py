"""The two Flax models: a small convolutional net and a byte-level transformer."""

import jax
import jax.numpy as jnp
from flax import linen as nn


class ConvNet(nn.Module):
    """Three 3x3 convolutions, two of them pooled, and two dense layers.

    On 28x28 images with the default widths it has 426,000 parameters.
    """

    widths: tuple[int, ...] = (16, 32, 64)
    hidden: int = 128
    classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images `[n, height, width]` to logits `[n, classes]`."""
        x = images[..., None]  # [n, h, w] -> [n, h, w, 1]
        for i, width in enumerate(self.widths):
            x = nn.relu(nn.Conv(width, (3, 3))(x))
            if i < 2:
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)  # [n, h/4, w/4, c] -> [n, h w c / 16]
        x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(self.classes)(x)


class Layer(nn.Module):
    """One pre-norm transformer layer: causal attention, then a GELU network."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[n, time, width]` to the same shape."""
        width = x.shape[-1]
        y = nn.LayerNorm()(x)
        query, key, value = (
            nn.Dense(width, use_bias=False, name=name)(y)
            for name in ("query", "key", "value")
        )
        split = (*x.shape[:-1], self.heads, width // self.heads)
        y = jax.nn.dot_product_attention(
            query.reshape(split),  # [n, t, width] -> [n, t, heads, width / heads]
            key.reshape(split),
            value.reshape(split),
            is_causal=True,
        )
        x = x + nn.Dense(width, use_bias=False, name="out")(y.reshape(x.shape))
        y = nn.gelu(nn.Dense(4 * width, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(width, name="down")(y)


class ByteTransformer(nn.Module):
    """A causal transformer over bytes with learned positions and tied embeddings."""

    layers: int = 4
    width: int = 96
    heads: int = 4
    context: int = 64

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps bytes `[n, time]` to the next bytes' logits `[n, time, 256]`."""
        small = nn.initializers.normal(0.02)
        positions = self.param("positions", small, (self.context, self.width))
        embed = nn.Embed(256, self.width, embedding_init=small, name="embed")
        x = embed(tokens.astype(jnp.int32)) + positions[: tokens.shape[1]]
        for _ in range(self.layers):
            x = Layer(self.heads)(x)
        return embed.attend(nn.LayerNorm()(x))  # [n, t, width] -> [n, t, 256]
