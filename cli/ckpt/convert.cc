// `tessera ckpt convert`: the tensors of a checkpoint in another format, streamed.
#include <fmt/core.h>

#include <algorithm>
#include <memory>

#include "checkpoint/export/export.hpp"
#include "checkpoint/export/rewrite.hpp"
#include "ckpt/command.hpp"
#include "ckpt/interrupt.hpp"
#include "ckpt/print.hpp"
#include "ckpt/progress.hpp"

namespace tsr::cli {

namespace {

struct Arguments {
    std::string out;
    std::string to;
    uint64_t shard_size = 0;
    std::string under;
};

constexpr uint64_t hf_shard_size = 5'000'000'000;  // the former default of transformers' save_pretrained()

ExportFormat format_of(const Arguments& arguments) {
    return export_format(arguments.to).value_or(ExportFormat::safetensors);  // hf is safetensors too
}

Exported export_with_progress(const Checkpoint& source, const Arguments& arguments) {
    ExportOptions options;
    options.format = format_of(arguments);
    const uint64_t size = arguments.to == "hf" && arguments.shard_size == 0 ? hf_shard_size : arguments.shard_size;
    options.shard_bytes = static_cast<int64_t>(std::min<uint64_t>(size, INT64_MAX));
    options.under = arguments.under;
    Progress shown("convert", source.manifest().size_bytes());
    int64_t told = 0;
    options.progress = [&](Phase, int64_t done, int64_t) {
        shown.add(done - told);
        told = done;
    };
    Peers alone(nullptr);
    return export_checkpoint(source, alone, arguments.out, options);
}

int to_other_format(const Checkpoint& source, const Arguments& arguments, Output output) {
    const Exported exported = export_with_progress(source, arguments);
    const int code = tell_unreadable(exported.unreadable);
    if (output == Output::json) {
        Json json;
        json.set("path", arguments.out);
        json.set("format", std::string(name_of(format_of(arguments))));
        Json::Array names;
        for (const std::string& name : exported.files) names.emplace_back(name);
        json.set("files", Json(std::move(names)));
        json.set("tensor_count", exported.tensor_count);
        json.set("size_bytes", exported.size_bytes);
        Json::Array left;
        for (const std::string& name : exported.left_out) left.emplace_back(name);
        json.set("left_out", Json(std::move(left)));
        if (!exported.unreadable.empty()) json.set("unreadable", unreadable_json(exported.unreadable));
        print_json(json);
        return code;
    }
    fmt::print("{}: {}, {} in {}\n", arguments.out, count_text(static_cast<size_t>(exported.tensor_count), "tensor"),
               size_text(exported.size_bytes), count_text(exported.files.size(), "file"));
    if (!exported.left_out.empty()) {
        complain(fmt::format("{} left out: {} can only hold tensors", count_text(exported.left_out.size(), "value"),
                             name_of(format_of(arguments))));
    }
    return code;
}

int to_native(const Checkpoint& source, const Arguments& arguments, Output output) {
    if (arguments.shard_size != 0 || !arguments.under.empty()) {
        throw Error(Code::invalid_argument, "--max-shard-size and --under cannot be used with --to native");
    }
    RewriteOptions options;
    options.files = RewriteOptions::Files::together;
    std::string path;
    {
        Progress progress("convert", source.manifest().size_bytes());
        options.progress = [&](int64_t bytes) { progress.add(bytes); };
        path = rewrite_checkpoint(source, arguments.out, options);
    }
    const auto& unreadable = source.manifest().unreadable;
    const int code = tell_unreadable(unreadable);
    if (output == Output::json) {
        Json json;
        json.set("path", path);
        json.set("format", "native");
        if (!unreadable.empty()) json.set("unreadable", unreadable_json(unreadable));
        print_json(json);
    } else {
        fmt::print("{}\n", path);
    }
    return code;
}

int convert(const std::string& path, const Arguments& arguments, Output output) {
    const Interruptible interruptible;
    const auto source = Checkpoint::open(path);
    return arguments.to == "native" ? to_native(*source, arguments, output)
                                    : to_other_format(*source, arguments, output);
}

}  // namespace

void add_convert(Command& ckpt) {
    const auto arguments = std::make_shared<Arguments>();
    Command command =
        add_command(ckpt, "convert", "Write a checkpoint's tensors in another format", checkpoint_path_what,
                    [arguments](const std::string& path, Output output) { return convert(path, *arguments, output); });
    command.add_option("out", arguments->out, "A new directory; for native, the root to save the checkpoint into")
        .required();
    command
        .add_option(
            "--to", arguments->to,
            "safetensors: whole tensors in model.safetensors; hf: the same, split like Hugging Face's into files of "
            "5 GB and an index; torch_dcp: for torch.distributed.checkpoint; torch_save: model.pt for torch.load(); "
            "npz: model.npz for numpy.load(); native: whole tensors of one rank")
        .required()
        .one_of({"safetensors", "hf", "torch_dcp", "torch_save", "npz", "native"});
    command
        .add_option("--max-shard-size,--shard-size", arguments->shard_size,
                    "For safetensors and hf: split into files of about this size (5GB) and an index")
        .size_with_unit(Option::Kilo::is_1000);
    command.add_option("--under", arguments->under,
                       "Convert only names with this prefix, including its dot ('model.'), and strip it");
    command.footer(exit_code_help(";\n     or entries that cannot be read were left out, and the rest was written"));
}

}  // namespace tsr::cli
