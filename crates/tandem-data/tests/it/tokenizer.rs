//! The tokenizer's folder, incremental decoding, training a small tokenizer, showing rows.

use crate::fixture::{self, tokenizer_with, write_tokenizer};
use serde_json::json;
use tandem_data::decode_stream::DecodeStream;
use tandem_data::error::Place;
use tandem_data::forest::{PairTokens, ScoredTokens};
use tandem_data::record::{Record, RowKind};
use tandem_data::row::{RowOptions, TokenRow, tokenise};
use tandem_data::show::{ShowOptions, show_pair, show_prompt, show_scored};
use tandem_data::text_stream::TextStream;
use tandem_data::tokenizer::Tokenizer;
use tandem_data::tokenizer_train::TokenizerRecipe;

#[test]
fn special_tokens_come_from_all_the_files_that_name_them() {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path(), false, None);
    let write = |name: &str, value: serde_json::Value| {
        std::fs::write(folder.path().join(name), value.to_string()).unwrap();
    };
    write("config.json", json!({"eos_token_id": 7, "pad_token_id": 3}));
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    assert_eq!((tokenizer.pad_id(), tokenizer.eos_ids()), (Some(0), &[7, 2][..]));
    // A vision–language model.
    write("config.json", json!({"text_config": {"eos_token_id": [7, 6]}, "pad_token_id": 3}));
    assert_eq!(Tokenizer::from_folder(folder.path()).unwrap().eos_ids(), [7, 6, 2]);
    // generation_config.json overrides config.json, special_tokens_map.json adds, tokens may be
    // objects.
    write("generation_config.json", json!({"eos_token_id": [5, 2]}));
    write(
        "tokenizer_config.json",
        json!({"bos_token": {"content": "<s>"}, "extra_special_tokens": ["<new>"]}),
    );
    write("special_tokens_map.json", json!({"eos_token": {"content": "</s>", "lstrip": false}}));
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    assert_eq!((tokenizer.pad_id(), tokenizer.eos_ids()), (Some(3), &[5, 2][..]));
    assert_eq!(tokenizer.eos_token().unwrap(), "</s>");
    assert_eq!(
        tokenizer.encode("<new>").unwrap(),
        [2048],
        "a token that tokenizer.json does not have is added"
    );
    // With these flags BOS and EOS are added whatever post-processor tokenizer.json has.
    write("tokenizer_config.json", json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true}));
    let plain = tokenizer.encode("the number").unwrap();
    let with_bos = Tokenizer::from_folder(folder.path()).unwrap().encode("the number").unwrap();
    assert_eq!(with_bos, [vec![1], plain].concat());
}

#[test]
fn an_absent_flag_leaves_the_tokens_of_its_side() {
    let folder = tempfile::tempdir().unwrap();
    let encoded = |bos: bool, eos: bool, flags: serde_json::Value| {
        write_tokenizer(folder.path(), bos, None);
        let path = folder.path().join("tokenizer.json");
        let mut file: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        if eos {
            file["post_processor"] = json!({"type": "TemplateProcessing", "pair": [], "single": [
                {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
                "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}});
            std::fs::write(path, file.to_string()).unwrap();
        }
        let mut config = json!({"bos_token": "<s>", "eos_token": "</s>"});
        config.as_object_mut().unwrap().extend(flags.as_object().unwrap().clone());
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let tokens = Tokenizer::from_folder(folder.path()).unwrap().encode("the").unwrap();
        (tokens.first() == Some(&1), tokens.last() == Some(&2))
    };
    assert_eq!(encoded(true, false, json!({"add_eos_token": false})), (true, false));
    assert_eq!(encoded(true, false, json!({"add_eos_token": true})), (true, true));
    assert_eq!(encoded(true, false, json!({"add_bos_token": false})), (false, false));
    assert_eq!(encoded(false, true, json!({"add_bos_token": true})), (true, true));
    assert_eq!(encoded(false, true, json!({"add_bos_token": false})), (false, true));
    assert_eq!(encoded(false, true, json!({"add_bos_token": true, "add_eos_token": false})), (true, false));
    assert_eq!(encoded(false, false, json!({"add_eos_token": true})), (false, true));
}

#[test]
fn an_adapters_tokenizer_files_come_before_its_bases() {
    let (base, adapter) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_tokenizer(base.path(), false, None);
    std::fs::create_dir(base.path().join("additional_chat_templates")).unwrap();
    std::fs::write(base.path().join("additional_chat_templates/tool_use.jinja"), "base's tools").unwrap();
    std::fs::write(base.path().join("config.json"), json!({"vocab_size": 2049}).to_string()).unwrap();
    let write = |name: &str, text: &str| std::fs::write(adapter.path().join(name), text).unwrap();
    let open = || Tokenizer::from_model(base.path(), Some(adapter.path()));
    let rendered = || {
        let options =
            tandem_data::chat_template::RenderOptions { tools: Some(&json!([1])), ..Default::default() };
        let messages = [fixture::message_of(&json!({"role": "user", "content": "x"}))];
        open().unwrap().chat_template().unwrap().render(&messages, options).unwrap()
    };
    assert_eq!(rendered(), "base's tools");
    let before = open().unwrap().fingerprint();
    assert_eq!(before, Tokenizer::from_folder(base.path()).unwrap().fingerprint());
    // A template alone is enough, whichever file has it.
    write(
        "tokenizer_config.json",
        r#"{"eos_token": "<|end|>", "chat_template": "config's {{ messages | length }}"}"#,
    );
    assert_eq!(rendered(), "config's 1");
    assert_eq!(open().unwrap().eos_token().unwrap(), "<|end|>");
    write("chat_template.jinja", "file's {{ messages | length }}");
    assert_eq!(rendered(), "file's 1");
    assert_ne!(open().unwrap().fingerprint(), before);
    // With a tokenizer.json, no file of the base's is used.
    let json = std::fs::read_to_string(base.path().join("tokenizer.json")).unwrap();
    std::fs::remove_file(adapter.path().join("tokenizer_config.json")).unwrap();
    write("tokenizer.json", &json);
    assert!(open().unwrap().eos_token().is_err());
    // One more token fits into the model's vocabulary, another name of a token and two more do not.
    let tokens = |added: serde_json::Value| {
        write("tokenizer_config.json", &json!({"added_tokens_decoder": added}).to_string());
        open().map(|tokenizer| tokenizer.vocab_size()).map_err(|error| error.to_string())
    };
    let token = |text: &str| json!({"content": text, "special": true});
    assert_eq!(tokens(json!({"2048": token("[X]")})).unwrap(), 2049);
    let beyond = tokens(json!({"2048": token("[X]"), "2049": token("[Y]")})).unwrap_err();
    let folders = [adapter.path(), base.path()].map(|path| path.display().to_string());
    assert!(folders.iter().all(|folder| beyond.contains(folder)), "{beyond}");
    assert!(beyond.contains("token \"[Y]\" has the id 2049, beyond the vocab_size 2049"), "{beyond}");
    write("tokenizer.json", &json.replace("<|user|>", "<|human|>"));
    let other = tokens(json!({})).unwrap_err();
    assert!(folders.iter().all(|folder| other.contains(folder)), "{other}");
    assert!(other.contains("token 4 is \"<|human|>\", but \"<|user|>\""), "{other}");
}

#[test]
fn added_tokens_have_their_declared_ids_and_special_ones_may_be_split() {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path(), false, None);
    let config = |more: serde_json::Value| {
        let mut config = json!({"eos_token": "</s>", "added_tokens_decoder": {
            "2048": {"content": "[X]", "special": true}, "2049": {"content": "[Y]", "special": false},
        }});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        Tokenizer::from_folder(folder.path()).unwrap()
    };
    let whole = config(json!({}));
    assert_eq!(whole.encode("[X][Y]").unwrap(), [2048, 2049]);
    let split = config(json!({"split_special_tokens": true}));
    let tokens = split.encode("[X][Y]").unwrap();
    assert!(!tokens.contains(&2048) && tokens.ends_with(&[2049]), "{tokens:?}");
    assert_ne!(split.fingerprint(), whole.fingerprint());
}

#[test]
fn a_special_token_keeps_the_flags_of_its_definition() {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path(), false, None);
    let tokens = |pad: serde_json::Value| {
        let config = json!({"eos_token": "</s>", "pad_token": pad});
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        let tokens = tokenizer.encode("the [X] the").unwrap();
        (tokens.len(), tokenizer.decode(&tokens, false).unwrap())
    };
    let (plain, text) = tokens(json!("[X]"));
    assert_eq!(text, "the [X] the");
    // It takes the space before it.
    assert_eq!(tokens(json!({"content": "[X]", "lstrip": true})), (plain - 1, "the[X] the".to_owned()));
}

#[test]
fn the_configuration_may_put_a_space_before_a_text() {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path(), false, None);
    let path = folder.path().join("tokenizer.json");
    let original = std::fs::read_to_string(&path).unwrap();
    let tokens = |file: &serde_json::Value, config: serde_json::Value| {
        std::fs::write(&path, file.to_string()).unwrap();
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        (tokenizer.encode("the").unwrap(), tokenizer.fingerprint())
    };
    let mut file: serde_json::Value = serde_json::from_str(&original).unwrap();
    let of = |class: &str, adds: bool| json!({"tokenizer_class": class, "add_prefix_space": adds});
    let (without, before) = tokens(&file, json!({"tokenizer_class": "GPT2Tokenizer"}));
    assert_eq!(tokens(&file, of("GPT2Tokenizer", false)), (without.clone(), before));
    assert_eq!(tokens(&file, of("PreTrainedTokenizerFast", true)), (without.clone(), before));
    let (with, after) = tokens(&file, of("GPT2Tokenizer", true));
    assert_ne!((&with, after), (&without, before));
    assert_eq!(with, {
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        tokenizer.encode(" the").unwrap()
    });
    // A space of the normalizer, as older Llama folders have it.
    file["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "e"}]});
    let (prepended, _) = tokens(&file, json!({}));
    assert_ne!(prepended, without);
    assert_eq!(tokens(&file, of("LlamaTokenizer", false)).0, without);
}

#[test]
fn a_token_that_is_part_of_a_character_has_its_own_bytes() {
    let (folder, tokenizer) = tokenizer_with(false, None);
    let text = "żółw 字𐍈<|end|>";
    let joined = |tokenizer: &Tokenizer, tokens: &[u32]| -> Vec<u8> {
        tokens.iter().flat_map(|&id| tokenizer.bytes(id).unwrap()).collect()
    };
    let tokens = tokenizer.encode(text).unwrap();
    let is_part = |id: &u32| tokenizer.decode(&[*id], false).unwrap().contains('\u{fffd}');
    assert!(tokens.iter().any(is_part), "some characters are several tokens");
    assert_eq!(joined(&tokenizer, &tokens), text.as_bytes());
    // SentencePiece's byte fallback.
    let path = folder.path().join("tokenizer.json");
    let mut file: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    file["decoder"] = json!({"type": "ByteFallback"});
    file["model"]["vocab"]["<0xE6>"] = 3000.into();
    std::fs::write(&path, file.to_string()).unwrap();
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    assert_eq!(tokenizer.decode(&[3000], false).unwrap(), "\u{fffd}");
    assert_eq!(tokenizer.bytes(3000).unwrap(), [0xe6]);
}

#[test]
fn merges_are_never_dropped() {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path(), false, None);
    let path = folder.path().join("tokenizer.json");
    let encoded =
        || Tokenizer::from_folder(folder.path()).unwrap().encode("the number of the beast").unwrap();
    let plain = encoded();
    let mut file: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    file["model"]["dropout"] = 0.9.into();
    std::fs::write(&path, file.to_string()).unwrap();
    assert_eq!(encoded(), plain);
}

#[test]
fn a_missing_eos_token_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path(), false, None);
    std::fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    assert!(tokenizer.eos_token().unwrap_err().to_string().contains("no `eos_token`"));
    std::fs::write(folder.path().join("tokenizer_config.json"), "{").unwrap();
    let error = Tokenizer::from_folder(folder.path()).err().unwrap().to_string();
    assert!(error.contains("tokenizer_config.json: not valid JSON"), "{error}");
}

#[test]
fn the_configurations_template_is_used_where_there_is_no_file() {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path(), false, None);
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let text = |config: serde_json::Value, tools: Option<&serde_json::Value>| {
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let tokenizer = Tokenizer::from_folder(folder.path())?;
        let options = tandem_data::chat_template::RenderOptions { tools, ..Default::default() };
        tokenizer
            .chat_template()?
            .render(&[fixture::message_of(&json!({"role": "user", "content": "x"}))], options)
    };
    assert_eq!(text(json!({"chat_template": "one {{ messages[0].role }}"}), None).unwrap(), "one user");
    let named = json!({"chat_template": [
        {"name": "default", "template": "two"}, {"name": "tool_use", "template": "{{ tools | length }}"}]});
    assert_eq!(text(named.clone(), None).unwrap(), "two");
    assert_eq!(text(named, Some(&json!([1, 2]))).unwrap(), "2");
    let by_name = json!({"chat_template": {"default": "three", "tool_use": "config's"}});
    assert_eq!(text(by_name.clone(), None).unwrap(), "three");
    std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
    std::fs::write(folder.path().join("additional_chat_templates/tool_use.jinja"), "file's").unwrap();
    assert_eq!(text(by_name, Some(&json!([1]))).unwrap(), "file's");
    let own = json!({"chat_template": "{{ image_token }}{{ boi_token }}{{ other_token }}",
        "extra_special_tokens": {"image_token": "<img>", "n": 1}, "boi_token": {"content": "<boi>"}, "other_token": true});
    assert_eq!(text(own, None).unwrap(), "<img><boi>");
    let tool_use = folder.path().join("additional_chat_templates/tool_use.jinja");
    let broken = || text(json!({"chat_template": "a\n{% if %}"}), None).unwrap_err().to_string();
    assert!(broken().contains("tokenizer_config.json: line 2"), "{}", broken());
    std::fs::write(&tool_use, "{% if %}").unwrap();
    let of_tools = text(json!({"chat_template": "a"}), None).unwrap_err().to_string();
    assert!(of_tools.contains("tool_use.jinja: line 1"), "{of_tools}");
    std::fs::remove_file(tool_use).unwrap();
    assert!(text(json!({}), None).unwrap_err().to_string().contains("no chat template"));
}

#[test]
fn the_assistants_turns_are_scored_with_their_end_markers() {
    let (_folder, tokenizer) = tokenizer_with(false, None);
    let place = Place { path: "x".into(), line: 1 };
    let row = r#"{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Größe 日本"}, {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Yes"}]}"#;
    let record = Record::parse(row.as_bytes(), RowKind::Supervised, &place).unwrap();
    let outcome = tokenise(&record, &tokenizer, &RowOptions::new(RowKind::Supervised)).unwrap();
    let Some(TokenRow::Scored { tokens, scored }) = outcome.row else { panic!("{outcome:?}") };
    // Runs of scored tokens, as text: the responses with all that the template puts after them.
    let mut runs = vec![Vec::new()];
    for (id, scored) in tokens.into_iter().zip(scored) {
        match (scored, runs.last_mut().unwrap()) {
            (1, run) => run.push(id),
            (_, run) if !run.is_empty() => runs.push(Vec::new()),
            _ => {}
        }
    }
    let texts: Vec<_> = runs.iter().map(|run| tokenizer.decode(run, false).unwrap()).collect();
    assert_eq!(texts, ["Größe 日本<|end|>\n", "Yes<|end|>\n"]);
}

#[test]
fn streaming_gives_the_text_without_splitting_characters() {
    let (_folder, tokenizer) = tokenizer_with(false, None);
    let text = "Explain 日本 😀 café, naïve</s> number";
    for skip_special_tokens in [false, true] {
        let ids = tokenizer.encode(text).unwrap();
        let mut stream = DecodeStream::new(&tokenizer, skip_special_tokens);
        let pieces: Vec<_> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
        assert_eq!(stream.finish().unwrap(), "");
        assert_eq!(pieces.concat(), tokenizer.decode(&ids, skip_special_tokens).unwrap());
        assert!(pieces.iter().filter(|piece| !piece.is_empty()).count() > 6, "{pieces:?}");
    }
    // An unfinished character at the end comes out of `finish`.
    let mut stream = DecodeStream::new(&tokenizer, true);
    let ids = tokenizer.encode("é").unwrap();
    assert_eq!(ids.len(), 2);
    assert_eq!(stream.push(ids[0]).unwrap(), "");
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
}

/// Bytes that begin no character come out before the end, so that what is decoded again stays short.
#[test]
fn bytes_of_no_character_are_given_out() {
    let (_folder, tokenizer) = tokenizer_with(false, None);
    let last = tokenizer.encode("é").unwrap()[1];
    let letter = tokenizer.encode("x").unwrap()[0];
    let ids = [vec![last; 100], vec![letter]].concat();
    let mut stream = DecodeStream::new(&tokenizer, true);
    let pieces: Vec<_> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    assert!(!pieces[20].is_empty() || pieces[..20].iter().any(|piece| !piece.is_empty()), "{pieces:?}");
    assert_eq!(pieces.concat(), tokenizer.decode(&ids, true).unwrap());
}

#[test]
fn a_stop_string_that_is_a_special_token_ends_the_text() {
    let (_folder, tokenizer) = tokenizer_with(false, None);
    let ids = tokenizer.encode("Explain 日本<|end|> number").unwrap();
    let text_of = |stop: &[String]| {
        let mut stream = TextStream::new(&tokenizer, stop);
        let mut text = String::new();
        for &id in &ids {
            text += &stream.push(id).unwrap();
            if stream.is_ended() {
                return (text, true);
            }
        }
        (text + &stream.finish().unwrap(), false)
    };
    assert_eq!(text_of(&["<|end|>".to_owned()]), ("Explain 日本".to_owned(), true));
    // What may begin another stop string is no longer held back.
    assert_eq!(text_of(&["<|end|>".to_owned(), "本 number".to_owned()]), ("Explain 日本".to_owned(), true));
    assert_eq!(text_of(&[]), ("Explain 日本 number".to_owned(), false));
}

/// Also one that no file calls special, whose text would be shown.
#[test]
fn a_token_that_ends_generation_is_no_text() {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path(), false, None);
    let plain = Tokenizer::from_folder(folder.path()).unwrap();
    let ids = plain.encode("the number the").unwrap();
    let config = json!({ "eos_token_id": ids[1] });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    assert!(tokenizer.eos_ids().contains(&ids[1]));
    let mut stream = TextStream::new(&tokenizer, &[]);
    let text: String = ids[..2].iter().map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(text + &stream.finish().unwrap(), plain.decode(&ids[..1], true).unwrap());
    assert!(stream.is_ended());
}

#[test]
fn a_trained_tokenizer_is_an_ordinary_folder_and_the_same_each_time() {
    let texts = || (0..200).map(|i| format!("the number {} of the other thing, sorted {}", i % 7, i % 3));
    let recipe = TokenizerRecipe {
        vocab_size: 280,
        extra_tokens: vec!["<|user|>".into()],
        chat_template: Some("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}".into()),
        ..TokenizerRecipe::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    recipe.train(texts(), &a).unwrap();
    recipe.train(texts(), &b).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        assert_eq!(std::fs::read(a.join(name)).unwrap(), std::fs::read(b.join(name)).unwrap(), "{name}");
    }
    let tokenizer = Tokenizer::from_folder(&a).unwrap();
    assert_eq!(tokenizer.vocab_size(), 280);
    assert_eq!((tokenizer.pad_id(), tokenizer.eos_ids()), (Some(0), &[2][..]));
    let text = "<|user|> the number 日本 of things";
    let ids = tokenizer.encode(text).unwrap();
    assert_eq!(ids[0], 3);
    assert!(ids.len() < text.len(), "merges were learned");
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    let small = TokenizerRecipe { vocab_size: 200, ..recipe };
    assert!(small.train(texts(), &a).unwrap_err().to_string().contains("at least 260"));
}

#[test]
fn shown_rows_mark_what_is_scored() {
    let (_folder, tokenizer) = tokenizer_with(false, None);
    let encode = |text: &str| tokenizer.encode(text).unwrap();
    let (prompt, chosen, rejected) = (encode("Explain the number\n"), encode(" good</s>"), encode("é"));
    let pair = PairTokens { prompt: &prompt, unseen: [0, 0], chosen: &chosen, rejected: &rejected };
    let plain = show_pair(&tokenizer, &pair, ShowOptions::default()).unwrap();
    assert_eq!(plain[0], "  prompt     5  E│xplain│ the│ number│⏎");
    assert_eq!(plain[1], "  chosen     2  [ good][</s>]");
    assert_eq!(plain[2], "rejected     2  [‹c3›][‹a9›]");
    let ids = show_pair(&tokenizer, &pair, ShowOptions { ids: true, ..Default::default() }).unwrap();
    assert!(ids[1].contains(&format!("[ good·{}]", chosen[0])), "{}", ids[1]);
    let color = show_pair(&tokenizer, &pair, ShowOptions { color: true, ..Default::default() }).unwrap();
    assert!(color[1].contains("48;5;22m good\x1b[0m") && color[2].contains("48;5;52m"), "{color:?}");
    let short = show_pair(&tokenizer, &pair, ShowOptions { limit: 3, ..Default::default() }).unwrap();
    assert_eq!(short[0], "  prompt     5  E│xplain … 2 more … ⏎");

    assert_eq!(show_prompt(&tokenizer, &prompt, ShowOptions::default()).unwrap(), &plain[..1]);

    let row = ScoredTokens { tokens: &prompt, scored: &[1, 0, 1, 0, 1] };
    let shown = show_scored(&tokenizer, &row, ShowOptions::default()).unwrap();
    assert_eq!(shown[0], "  tokens     5  E│xplain[ the]│ number[⏎]", "the first token is never predicted");
    assert_eq!(shown[1], "  scored     2");
    assert!(
        show_scored(&tokenizer, &ScoredTokens { tokens: &[9999], scored: &[0] }, ShowOptions::default())
            .is_err()
    );
}

#[test]
fn another_chat_template_is_another_tokenizer() {
    let (_folder, tokenizer) = tokenizer_with(false, None);
    let (folders, message) =
        (tokenizer.fingerprint(), fixture::message_of(&json!({"role": "user", "content": "x"})));
    let changed = tokenizer.with_chat_template("[{{ messages[0].role }}]").unwrap();
    assert_ne!(changed.fingerprint(), folders);
    let text = changed.chat_template().unwrap().render(&[message], Default::default()).unwrap();
    assert_eq!(text, "[user]");
    let error = changed.with_chat_template("{% if %}").err().unwrap().to_string();
    assert!(error.contains("chat template: line 1"), "{error}");
}
