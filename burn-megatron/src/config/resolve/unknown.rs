//! What is said of a key that does not exist.

use crate::config::find::find_anywhere;
use crate::config::keys::KEYS;
use crate::config::problem::did_you_mean;
use crate::config::sections::SECTIONS;

/// Keys of earlier versions without a successor, and why they were removed.
const REMOVED: [(&str, &str); 1] = [("performance.tune-products", "tuning GEMMs gained nothing; delete the key")];

/// The message for a key that does not exist.
pub(in crate::config) fn unknown(path: &str) -> String {
    if let Some((_, why)) = REMOVED.iter().find(|(removed, _)| *removed == path) {
        return format!("{path} was removed: {why}");
    }
    let sections = || SECTIONS.iter().map(|(name, _)| *name);
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
