//! What a text must say.

/// Fails unless a text, or the text of an error, contains all of these words.
macro_rules! says {
    ($text:expr, $($words:expr),+ $(,)?) => {{
        let text = $text.to_string();
        $({
            let words = $words;
            assert!(text.contains(words), "{words:?} is not in: {text}");
        })+
    }};
}
