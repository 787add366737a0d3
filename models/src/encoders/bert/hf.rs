//! BERT in Hugging Face's words.

use backend_dist::parallelize::Plan;
use burn::tensor::Device;
use serde_json::Value;

use super::config::BertConfig;
use super::model::Bert;
use crate::hf::{HfError, HfModule, InputError, ModuleInputs, ModuleNames, ModuleOutput};

impl HfModule for Bert {
    type Config = BertConfig;

    const NAMES: ModuleNames = ModuleNames {
        pairs: &[
            ("embeddings.words", "bert.embeddings.word_embeddings"),
            ("embeddings.positions", "bert.embeddings.position_embeddings"),
            ("embeddings.types", "bert.embeddings.token_type_embeddings"),
            ("embeddings.norm", "bert.embeddings.LayerNorm"),
            ("layers.*.attention.query", "bert.encoder.layer.*.attention.self.query"),
            ("layers.*.attention.key", "bert.encoder.layer.*.attention.self.key"),
            ("layers.*.attention.value", "bert.encoder.layer.*.attention.self.value"),
            ("layers.*.attention.output", "bert.encoder.layer.*.attention.output.dense"),
            ("layers.*.attention_norm", "bert.encoder.layer.*.attention.output.LayerNorm"),
            ("layers.*.feed_forward.linear_inner", "bert.encoder.layer.*.intermediate.dense"),
            ("layers.*.feed_forward.linear_outer", "bert.encoder.layer.*.output.dense"),
            ("layers.*.feed_forward_norm", "bert.encoder.layer.*.output.LayerNorm"),
            ("predictions.dense", "cls.predictions.transform.dense"),
            ("predictions.norm", "cls.predictions.transform.LayerNorm"),
            ("predictions.bias", "cls.predictions.bias"),
            ("pooler", "bert.pooler.dense"),
            ("next_sentence", "cls.seq_relationship"),
        ],
        copies: &[
            ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ],
        derived: &["bert.embeddings.position_ids", "embeddings.position_ids"],
    };

    fn from_hf(config: &Value) -> Result<BertConfig, HfError> {
        BertConfig::read(config)
    }

    fn to_hf(config: &BertConfig) -> Value {
        config.write()
    }

    /// The published folders say `BertForMaskedLM` and have the other head too. Those of `BertModel` may lack the pooler.
    fn present(config: BertConfig, has: &dyn Fn(&str) -> bool) -> BertConfig {
        let next_sentence = config.next_sentence || config.predictions && has("cls.seq_relationship.weight");
        let pooler = config.pooler && ["bert.pooler.dense.weight", "pooler.dense.weight"].into_iter().any(has);
        BertConfig { next_sentence, pooler, ..config }
    }

    fn without_dropout(config: BertConfig) -> BertConfig {
        BertConfig { hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, ..config }
    }

    fn init(config: &BertConfig, device: &Device) -> Self {
        Self::new(config, device)
    }

    /// Files of `BertModel` lack the first part.
    fn older_names(name: &str) -> Vec<String> {
        name.strip_prefix("bert.").map(String::from).into_iter().collect()
    }

    /// And so does that model in memory.
    fn names_in_memory(name: &str) -> Vec<String> {
        [vec![name.into()], Self::older_names(name)].concat()
    }

    fn plan() -> Plan {
        Self::plan()
    }

    /// `input_ids [batch, sequence]`, and perhaps of the same shape `token_type_ids`, `attention_mask` (0 is padding) and
    /// `labels`, and with them `next_sentence_label [batch]` (0: it follows). Labels belong to heads that the model may not
    /// have: without any it gives hidden states.
    fn run(&self, inputs: &ModuleInputs) -> Result<ModuleOutput, InputError> {
        let [vocabulary, _] = self.embeddings.words.weight.lazy_shape().dims();
        let [most, _] = self.embeddings.positions.weight.lazy_shape().dims();
        let [types, _] = self.embeddings.types.weight.lazy_shape().dims();
        let names = ["input_ids", "token_type_ids", "attention_mask", "labels", "next_sentence_label"];
        let taken = match (&self.predictions, &self.next_sentence) {
            (None, _) => 3,
            (Some(_), None) => 4,
            (Some(_), Some(_)) => 5,
        };
        inputs.expect_only(&names[..taken])?;
        let shape @ [batch, length] = inputs.shape::<2>("input_ids")?;
        if length > most {
            let legal = format!("at most {most} tokens (max_position_embeddings)");
            return Err(InputError::Shape { name: "input_ids".into(), found: shape.into(), legal });
        }
        for name in ["token_type_ids", "attention_mask", "labels"] {
            inputs.expect_shape(name, &shape)?;
        }
        inputs.expect_shape("next_sentence_label", &[batch])?;
        let ids = inputs.ids("input_ids", vocabulary)?;
        let optional = |name: &str, limit| inputs.has(name).then(|| inputs.ids::<2>(name, limit)).transpose();
        let token_types = optional("token_type_ids", types)?;
        let padding = optional("attention_mask", 2)?.map(|mask| mask.equal_elem(0));
        let labels = inputs.has("labels").then(|| inputs.labels("labels", vocabulary)).transpose()?;
        let follows = "next_sentence_label";
        let follows = inputs.has(follows).then(|| inputs.labels::<1>(follows, 2)).transpose()?;

        let hidden = self.encode(ids, token_types, padding);
        if self.predictions.is_none() {
            let pooled = self.pool(hidden.clone());
            let output = ModuleOutput { tensors: Vec::new(), loss: None }.with("last_hidden_state", hidden);
            return Ok(match pooled {
                Some(pooled) => output.with("pooler_output", pooled),
                None => output,
            });
        }
        let logits = self.logits(hidden.clone());
        let relations = self.next_sentence_logits(hidden);
        let next = relations.clone().zip(follows);
        let loss = labels.map(|labels| Self::loss(logits.clone(), labels, next));
        let output = ModuleOutput::new(logits, loss);
        Ok(match relations {
            Some(relations) => output.with("seq_relationship_logits", relations),
            None => output,
        })
    }
}
