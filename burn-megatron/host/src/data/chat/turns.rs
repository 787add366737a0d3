//! Where assistant turns are in a text whose template does not mark them: what each adds to the text before it.

use std::ops::Range;

use minijinja::Error;
use minijinja::value::Value;

use super::values::get;

/// Bytes of the text that the assistant messages `assistant` (indices) have added to `text`, the whole conversation.
/// `render(n, prompted)` renders the first `n` messages, with the beginning of an assistant turn where `prompted`.
/// Fails if a beginning of the conversation is not rendered as the beginning of the text: templates that treat the last
/// turn in another way, for example by removing what was thought in earlier ones.
pub(super) fn by_prefixes(
    text: &str,
    assistant: &[usize],
    render: impl Fn(usize, bool) -> Result<String, Error>,
) -> Result<Vec<Range<usize>>, String> {
    let prefix = |count: usize, prompted: bool, index: usize| {
        let rendered = render(count, prompted).map_err(|error| {
            format!("messages[{index}]: the chat template has no {{% generation %}} blocks and fails for the {count} first messages: {error}")
        })?;
        match text.starts_with(&rendered) {
            true => Ok(rendered.len()),
            false => Err(format!(
                "messages[{index}]: the chat template writes the first messages in another way when there are more, so the assistant \
                 turn cannot be found in the text; put {{% generation %}} and {{% endgeneration %}} around the assistant's text in \
                 the template"
            )),
        }
    };
    let mut turns = Vec::with_capacity(assistant.len());
    for &index in assistant {
        let (start, end) = (prefix(index, true, index)?, prefix(index + 1, false, index)?);
        if start >= end {
            return Err(format!("messages[{index}]: the chat template writes nothing for this assistant turn"));
        }
        turns.push(start..end);
    }
    Ok(turns)
}

/// The turns that are learned: those of messages whose `weight` is 0, as OpenAI's files of conversations have it, are not.
/// `turns` are those of the assistant's messages from `first` on.
pub(super) fn with_weight(
    turns: Vec<Range<usize>>,
    messages: &[Value],
    first: usize,
) -> Result<Vec<Range<usize>>, String> {
    let is_assistant = |message: &Value| get(message, "role").is_some_and(|role| role.as_str() == Some("assistant"));
    let all = messages.iter().enumerate().skip(first).filter(|(_, message)| is_assistant(message));
    let learned = all.map(|(index, message)| match get(message, "weight") {
        None => Ok(true),
        Some(weight) => match f64::try_from(weight.clone()) {
            Ok(0.0) => Ok(false),
            Ok(1.0) => Ok(true),
            _ => Err(format!("messages[{index}].weight: {weight}; legal: 0, this turn is not learned, or 1")),
        },
    });
    let learned = learned.collect::<Result<Vec<bool>, _>>()?;
    if !learned.contains(&false) {
        return Ok(turns);
    }
    if !learned.contains(&true) {
        return Err(
            "messages: all of the assistant have the weight 0, there is nothing to learn; remove the row".into()
        );
    }
    if turns.len() != learned.len() {
        return Err(format!(
            "messages: weight: the chat template marks {} parts for {} messages of the assistant; give it one \
             {{% generation %}} block for each",
            turns.len(),
            learned.len()
        ));
    }
    Ok(turns.into_iter().zip(learned).filter_map(|(turn, is_learned)| is_learned.then_some(turn)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_what_each_message_adds_and_other_beginnings_are_refused() {
        let messages = ["u:a\n", "m:b\n", "u:c\n", "m:d\n"];
        let render = |count: usize, prompted: bool| Ok(messages[..count].concat() + if prompted { "m:" } else { "" });
        let text = messages.concat();
        assert_eq!(by_prefixes(&text, &[1, 3], render), Ok(vec![6..8, 14..16]));
        let forgetful = |count: usize, prompted: bool| {
            let last = if count == 2 { "m:<think>b\n" } else { "m:b\n" };
            let all = ["u:a\n", last, "u:c\n", "m:d\n"];
            Ok(all[..count].concat() + if prompted { "m:" } else { "" })
        };
        let refused = by_prefixes(&text, &[1, 3], forgetful).unwrap_err();
        assert!(refused.contains("messages[1]") && refused.contains("{% generation %}"), "{refused}");
    }

    #[test]
    fn turns_with_the_weight_0_are_not_learned() {
        let of = |weights: [&str; 2]| {
            let [one, two] = weights.map(|weight| format!(r#"{{"role": "assistant", "content": "b"{weight}}}"#));
            let user = r#"{"role": "user", "content": "a", "weight": 0}"#;
            let messages: Vec<Value> = serde_json::from_str(&format!("[{user}, {one}, {user}, {two}]")).unwrap();
            with_weight(vec![0..2, 4..6], &messages, 0)
        };
        let [none, zero, one] = ["", r#", "weight": 0"#, r#", "weight": 1.0"#];
        assert_eq!(of([none, one]), Ok(vec![0..2, 4..6]));
        assert_eq!(of([zero, none]), Ok(vec![4..6]));
        assert_eq!(of([one, zero]), Ok(vec![0..2]));
        assert!(of([zero, zero]).unwrap_err().contains("nothing to learn"));
        let half = of([none, r#", "weight": 0.5"#]).unwrap_err();
        assert!(half.starts_with("messages[3].weight: 0.5; legal: 0"), "{half}");
        let messages = [Value::from_serialize(serde_json::json!({"role": "assistant", "weight": 0})), Value::from(1)];
        assert!(with_weight(vec![0..2], &messages, 1).is_ok());
    }
}
