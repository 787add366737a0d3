//! What is said of a key that does not exist.

use crate::config::find::{find, find_anywhere};
use crate::config::keys::KEYS;
use crate::config::problem::did_you_mean;
use crate::config::sections::SECTIONS;

/// Keys of earlier versions without a successor, and why they were removed.
const REMOVED: [(&str, &str); 1] = [("performance.tune-products", "tuning GEMMs gained nothing; delete the key")];

/// Keys of peft that have no counterpart, and why.
const ABSENT: [(&str, &[&str], &str); 3] = [
    ("lora", &["lora_dropout", "lora-dropout", "dropout"], "inputs of adapters have no dropout; delete the key"),
    ("lora", &["bias", "lora_bias"], "biases stay as they are; delete the key"),
    ("lora", &["modules_to_save", "modules-to-save"], "everything but the adapters is frozen; delete the key"),
];

/// Other words for sections.
const SECTION_WORDS: [(&str, &str); 12] = [
    ("dpo", "preference"),
    ("ipo", "preference"),
    ("kto", "preference"),
    ("orpo", "preference"),
    ("simpo", "preference"),
    ("sft", "chat"),
    ("peft", "lora"),
    ("qlora", "lora"),
    ("dora", "lora"),
    ("distillation", "distill"),
    ("rl", "grpo"),
    ("ppo", "grpo"),
];

/// The message for a key that does not exist.
pub(in crate::config) fn unknown(path: &str) -> String {
    if let Some((_, why)) = REMOVED.iter().find(|(removed, _)| *removed == path) {
        return format!("{path} was removed: {why}");
    }
    let sections = || SECTIONS.iter().map(|(name, _)| *name);
    let (section, name) = path.split_once('.').unwrap_or((path, ""));
    if let Some((.., why)) = ABSENT.iter().find(|(of, names, _)| *of == section && names.contains(&name)) {
        return format!("unknown key `{path}`: {why}");
    }
    if let Some((_, ours)) = SECTION_WORDS.iter().find(|(word, _)| *word == section) {
        return match find(&format!("{ours}.{name}")) {
            Some(key) => format!("unknown key `{path}`; did you mean `{}`?", key.path),
            None => format!("unknown key `{path}`; did you mean the section [{ours}]?"),
        };
    }
    match path.split_once('.') {
        Some((_, name)) => {
            // Under another name, as Megatron's, the right section is not to be guessed by distance.
            let elsewhere = find_anywhere(name).filter(|key| key.name() != name);
            let guess = elsewhere.map(|key| format!("; did you mean `{}`?", key.path));
            let guess = guess.unwrap_or_else(|| did_you_mean(path, KEYS.iter().map(|key| key.path)));
            format!("unknown key `{path}`{guess}")
        }
        None => {
            let in_section = find_anywhere(path).map(|key| format!("; did you mean `{}`?", key.path));
            if sections().any(|section| section == path) {
                return format!("`{path}` is a section: write [{path}]{}", in_section.unwrap_or_default());
            }
            let guess = in_section.unwrap_or_else(|| did_you_mean(path, sections()));
            format!("unknown key `{path}`{guess}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_other_programs_lead_to_ours() {
        for (key, said) in [
            ("dpo.train", "unknown key `dpo.train`; did you mean `preference.train`?"),
            ("sft.epochs", "unknown key `sft.epochs`; did you mean the section [chat]?"),
            ("qlora.r", "unknown key `qlora.r`; did you mean `lora.rank`?"),
            ("dpo", "unknown key `dpo`; did you mean the section [preference]?"),
            (
                "lora.lora_dropout",
                "unknown key `lora.lora_dropout`: inputs of adapters have no dropout; delete the key",
            ),
        ] {
            assert_eq!(unknown(key), said);
        }
        assert!(SECTION_WORDS.iter().all(|(word, ours)| {
            let is_section = |name: &str| SECTIONS.iter().any(|(section, _)| *section == name);
            is_section(ours) && !is_section(word)
        }));
    }
}
