//! Texts in HTML and SVG.

/// The names of colours.
pub fn key<'a>(names: impl Iterator<Item = (usize, &'a str)>) -> String {
    let names = names.map(|(colour, name)| format!("<span class=\"c{colour}\">{}</span>", escape(name)));
    format!("<div class=\"key\">{}</div>\n", names.collect::<String>())
}

/// `text` where HTML and SVG expect text: no markup, no control characters.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            // Also what turns the direction of text, so that a name cannot look like another one.
            c if c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') => {
                out.push('\u{fffd}')
            }
            c => out.push(c),
        }
    }
    out
}
