//! A row of preference data as two conversations.

use minijinja::value::{Value, ValueKind};

use super::row::{Conversation, conversation, tools};
use super::values::{get, kind, list, message};

/// The conversations of a row: `chosen` and `rejected`, texts or lists of messages, after a `prompt`, or with one
/// prompt in both, which a text under `prompt` may repeat.
pub(super) fn pair(row: &Value) -> Result<[Conversation; 2], String> {
    if row.kind() != ValueKind::Map {
        return Err(format!("a row is a JSON object, this is {}", kind(row)));
    }
    let answers = ["chosen", "rejected"]
        .map(|key| get(row, key).ok_or_else(|| format!("{key}: missing")).map(|value| (key, value)));
    let [chosen, rejected] = answers;
    let answers = [chosen?, rejected?];
    let prompt = match get(row, "prompt") {
        None => None,
        Some(prompt) => Some(match prompt.as_str() {
            Some(text) => vec![message("user", text)],
            None => list(row, "prompt")?,
        }),
    };
    let mut both = Vec::with_capacity(2);
    for (key, answer) in answers {
        both.push(match answer.as_str() {
            Some(text) if text.trim().is_empty() => {
                return Err(format!("{key}: empty, there is nothing to prefer; remove the row"));
            }
            Some(_) if prompt.is_none() => {
                return Err(format!(
                    "prompt: missing; without it {key} is a list of messages that begins with the prompt's"
                ));
            }
            Some(text) => vec![message("assistant", text)],
            None => list(row, key)?,
        });
    }
    let is_whole = |answer: &Vec<Value>| {
        answer.first().and_then(|message| get(message, "role")).is_some_and(|role| role.as_str() != Some("assistant"))
    };
    let repeats = get(row, "prompt").is_some_and(|prompt| prompt.as_str().is_some()) && both.iter().all(is_whole);
    let (prompt, common) = match prompt.filter(|_| !repeats) {
        Some(prompt) => (prompt, 0),
        // What both begin with, up to the last message that is not an assistant's.
        None => {
            let same = both[0].iter().zip(&both[1]).take_while(|(a, b)| a == b).count();
            (Vec::new(), same.min(both[0].len().saturating_sub(1)).min(both[1].len().saturating_sub(1)))
        }
    };
    let tools = tools(row)?;
    let mut conversations = Vec::with_capacity(2);
    for (key, answer) in ["chosen", "rejected"].into_iter().zip(both) {
        let messages = [prompt.clone(), answer].concat();
        let start = prompt.len().max(common);
        if start == 0 {
            return Err(format!(
                "{key}: there is no prompt; the first messages of chosen and rejected must be the same"
            ));
        }
        conversations.push(conversation(messages, start, tools.clone()).map_err(|what| format!("{key}: {what}"))?);
    }
    let rejected = conversations.pop().expect("two");
    Ok([conversations.pop().expect("two"), rejected])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<[Vec<String>; 2], String> {
        let words = |conversation: &Conversation| {
            let texts = conversation.messages.iter().map(|m| get(m, "content").unwrap().to_string());
            texts
                .enumerate()
                .map(|(at, text)| if at < conversation.prompt { format!("({text})") } else { text })
                .collect()
        };
        Ok(pair(&serde_json::from_str(json).unwrap())?.each_ref().map(words))
    }

    #[test]
    fn a_prompt_is_given_or_common() {
        let expected = [["(Q)", "A"], ["(Q)", "B"]].map(|side| side.map(String::from).to_vec());
        assert_eq!(parse(r#"{"prompt": "Q", "chosen": "A", "rejected": "B"}"#).unwrap(), expected);
        let list = |text: &str| format!(r#"[{{"role": "assistant", "content": "{text}"}}]"#);
        let user = r#"{"role": "user", "content": "Q"}"#;
        let row = format!(r#"{{"prompt": [{user}], "chosen": {}, "rejected": {}}}"#, list("A"), list("B"));
        assert_eq!(parse(&row).unwrap(), expected);
        let whole = |text: &str| format!(r#"[{user}, {{"role": "assistant", "content": "{text}"}}]"#);
        let row = format!(r#"{{"chosen": {}, "rejected": {}}}"#, whole("A"), whole("B"));
        assert_eq!(parse(&row).unwrap(), expected);
        // Said twice, as in UltraFeedback.
        let row = format!(r#"{{"prompt": "Q", "chosen": {}, "rejected": {}}}"#, whole("A"), whole("B"));
        assert_eq!(parse(&row).unwrap(), expected);
    }

    #[test]
    fn keys_of_bad_rows_are_named() {
        for (row, words) in [
            (r#"{"prompt": "Q", "chosen": "A"}"#, "rejected: missing"),
            (r#"{"prompt": "Q", "chosen": "A", "rejected": " "}"#, "rejected: empty"),
            (r#"{"chosen": "A", "rejected": "B"}"#, "prompt: missing"),
            (r#"{"prompt": 3, "chosen": "A", "rejected": "B"}"#, "prompt: a list of messages, this is a number"),
            (
                r#"{"chosen": [{"role": "user", "content": "Q"}], "rejected": [{"role": "user", "content": "R"}]}"#,
                "there is no prompt",
            ),
            (
                r#"{"prompt": "Q", "chosen": [{"role": "user", "content": "A"}], "rejected": "B"}"#,
                "chosen: completion: no message",
            ),
        ] {
            let error = parse(row).unwrap_err();
            assert!(error.contains(words), "{row}: {error}");
        }
    }
}
