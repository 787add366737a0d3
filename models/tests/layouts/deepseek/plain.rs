//! DeepSeek-V3 without experts, formula by formula on vectors of one sequence.

use models::DeepSeekV3Config;
use models::layers::{RopeConfig, RopeScaling, RotaryEmbedding};

use crate::harness::{Noise, host};
use burn::tensor::{DType, Device};
use models::WeightSource;

/// One vector per position.
type Rows = Vec<Vec<f64>>;

pub struct Plain<'a> {
    pub config: &'a DeepSeekV3Config,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(a: &Rows, b: &Rows) -> Rows {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
}

impl Plain<'_> {
    fn weight(&self, name: &str, shape: &[usize]) -> Vec<f64> {
        let whole: Vec<_> = shape.iter().map(|size| 0..*size).collect();
        Noise.read(&format!("{name}.weight"), shape, &whole).unwrap()
    }

    /// `x wᵀ`.
    fn linear(&self, x: &Rows, name: &str, out: usize) -> Rows {
        let inputs = x[0].len();
        let weight = self.weight(name, &[out, inputs]);
        x.iter().map(|x| weight.chunks(inputs).map(|row| dot(row, x)).collect()).collect()
    }

    fn norm(&self, x: &Rows, name: &str) -> Rows {
        let weight = self.weight(name, &[x[0].len()]);
        let one = |x: &Vec<f64>| {
            let scale = (dot(x, x) / x.len() as f64 + 1e-6).sqrt();
            x.iter().zip(&weight).map(|(x, w)| w * x / scale).collect()
        };
        x.iter().map(one).collect()
    }

    fn embedded(&self, tokens: &[usize]) -> Rows {
        let hidden = self.config.hidden_size;
        let table = self.weight("embed_tokens", &[self.config.vocab_size, hidden]);
        tokens.iter().map(|token| table[token * hidden..(token + 1) * hidden].to_vec()).collect()
    }

    /// Rotates the pairs `(j, j + d/2)` of every position's first `d = qk_rope_head_dim` features.
    fn rotated(&self, x: &Rows) -> Rows {
        let (d, scaling) = (self.config.qk_rope_head_dim, self.config.rope_scaling.map(RopeScaling::Yarn));
        let rope = RopeConfig { head_dim: d, theta: self.config.rope_theta, scaling };
        let angles = RotaryEmbedding::new(&rope).angles(0..x.len(), DType::F64, &Device::flex());
        let (cos, sin) = (host(angles.cos), host(angles.sin));
        let turn = |(position, x): (usize, &Vec<f64>)| {
            let mut turned = x.clone();
            for pair in 0..d / 2 {
                let (cos, sin) = (cos[position * d / 2 + pair], sin[position * d / 2 + pair]);
                turned[pair] = x[pair] * cos - x[pair + d / 2] * sin;
                turned[pair + d / 2] = x[pair + d / 2] * cos + x[pair] * sin;
            }
            turned
        };
        x.iter().enumerate().map(turn).collect()
    }

    fn attention(&self, x: &Rows, name: &str) -> Rows {
        let config = self.config;
        let (rope, plain, value) = (config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim);
        let (heads, rank) = (config.num_attention_heads, config.q_lora_rank.unwrap());
        let part = |rows: &Rows, start: usize, size: usize| -> Rows {
            rows.iter().map(|row| row[start..start + size].to_vec()).collect()
        };
        let q_latent = self.norm(&self.linear(x, &format!("{name}.q_a_proj"), rank), &format!("{name}.q_a_layernorm"));
        let q = self.linear(&q_latent, &format!("{name}.q_b_proj"), heads * (rope + plain));
        let latent = self.linear(x, &format!("{name}.kv_a_proj_with_mqa"), config.kv_lora_rank + rope);
        let shared = self.rotated(&part(&latent, config.kv_lora_rank, rope));
        let kv_latent = self.norm(&part(&latent, 0, config.kv_lora_rank), &format!("{name}.kv_a_layernorm"));
        let kv = self.linear(&kv_latent, &format!("{name}.kv_b_proj"), heads * (plain + value));
        let sharpened = config.rope_scaling.map_or(1.0, |yarn| 0.1 * yarn.factor.ln() + 1.0);
        let scale = sharpened * sharpened / ((rope + plain) as f64).sqrt();
        let mut context: Rows = vec![Vec::new(); x.len()];
        for head in 0..heads {
            let q = self.rotated(&part(&q, head * (rope + plain), rope + plain));
            let k = part(&kv, head * (plain + value), plain);
            let v = part(&kv, head * (plain + value) + plain, value);
            for (position, out) in context.iter_mut().enumerate() {
                let score = |key: usize| {
                    let (turned, rest) = q[position].split_at(rope);
                    (scale * (dot(turned, &shared[key]) + dot(rest, &k[key]))).exp()
                };
                let scores: Vec<f64> = (0..=position).map(score).collect();
                let total: f64 = scores.iter().sum();
                out.extend((0..value).map(|i| scores.iter().zip(&v).map(|(s, v)| s / total * v[i]).sum::<f64>()));
            }
        }
        self.linear(&context, &format!("{name}.o_proj"), config.hidden_size)
    }

    fn mlp(&self, x: &Rows, name: &str) -> Rows {
        let width = self.config.intermediate_size;
        let [gate, up] = ["gate", "up"].map(|part| self.linear(x, &format!("{name}.{part}_proj"), width));
        let one = |(gate, up): (&f64, &f64)| gate / (1.0 + (-gate).exp()) * up;
        let active = gate.iter().zip(&up).map(|(gate, up)| gate.iter().zip(up).map(one).collect()).collect();
        self.linear(&active, &format!("{name}.down_proj"), self.config.hidden_size)
    }

    fn block(&self, x: &Rows, index: usize) -> Rows {
        let name = format!("layers.{index}");
        let x =
            add(x, &self.attention(&self.norm(x, &format!("{name}.input_layernorm")), &format!("{name}.attention")));
        let normalised = self.norm(&x, &format!("{name}.post_attention_layernorm"));
        add(&x, &self.mlp(&normalised, &format!("{name}.mlp")))
    }

    /// `-log p(target)` of each position's normalised hidden states.
    fn losses(&self, x: &Rows, targets: &[usize]) -> Vec<f64> {
        let logits = self.linear(x, "lm_head", self.config.vocab_size);
        let loss = |(logits, target): (&Vec<f64>, &usize)| {
            logits.iter().map(|logit| logit.exp()).sum::<f64>().ln() - logits[*target]
        };
        logits.iter().zip(targets).map(loss).collect()
    }

    /// Of the next token, then of those that each module predicts, as long as there are such. Position `i` of module
    /// `k` combines the hidden states there with the embedding of the token at `i + k`, `labels[i + k - 1]`, and
    /// predicts `labels[i + k]`.
    pub fn all_losses(&self, tokens: &[usize], labels: &[usize]) -> Vec<Vec<f64>> {
        let layers = self.config.num_hidden_layers;
        let x = (0..layers).fold(self.embedded(tokens), |x, layer| self.block(&x, layer));
        let mut x = self.norm(&x, "norm");
        let mut all = Vec::from([self.losses(&x, labels)]);
        for module in 0..self.config.num_nextn_predict_layers {
            let (name, left) = (format!("layers.{}", layers + module), labels.len() - module - 1);
            x.truncate(left);
            let embedded = self.norm(&self.embedded(&labels[module..module + left]), &format!("{name}.enorm"));
            let hidden = self.norm(&x, &format!("{name}.hnorm"));
            let both = embedded.into_iter().zip(hidden).map(|(e, h)| [e, h].concat()).collect();
            let input = self.linear(&both, &format!("{name}.eh_proj"), self.config.hidden_size);
            x = self.norm(&self.block(&input, layers + module), &format!("{name}.shared_head.norm"));
            all.push(self.losses(&x, &labels[module + 1..]));
        }
        all
    }
}
