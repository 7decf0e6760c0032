// Feeds mutated traces to the reader. Built with the address and undefined-behaviour sanitizers.
// Usage: fuzz_reader SEED MUTATIONS FILE...
#include <fstream>
#include <iterator>
#include <random>

#include "../../../native/reader.cpp"

int main(int argc, char** argv) {
  std::mt19937_64 random((u64)atoll(argv[1]));
  auto below = [&](size_t n) { return n ? (size_t)(random() % n) : 0; };
  std::vector<std::string> bases;
  for (int k = 3; k < argc; k++) {
    std::ifstream file(argv[k], std::ios::binary);
    bases.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  const std::string tokens[] = {"\"", "{", "}", "[", "]", ",", ":", "\\", "\n", "\x01", "\xff", "\xc3", "\xed\xa0\x80", "null", "NaN",
      "-", "0", "1e5", "1e-400", "0.0005", "99999999999999999999999999999999999999999999", ".", "}, {\"ph\":\"X\",", "\\u12", "\\ud800",
      "\"args\":{\"bytes\":\"256\"}", "[[[[", "\"ts\":\"1.5\"", "\"id\":\"0xfF\",", "\"pid\":null,", "\"tid\":", "\"traceEvents\":[", "{\"ph\":\"X\",\"\\u006eame\":\"a\",\"id\":1}", std::string(600, '[')};
  const char* keys[] = {"correlation", "bytes", "Input Dims", "name", "@id", "@cat"};
  const u8 kinds[] = {INTEGER, INTEGER, TEXT, TEXT, ID, TEXT};
  const int widths[] = {512, 256, 0};
  const char* symbols[] = {"_ZN2at6native4copyIfEEvPT_", "_Z1fIJiiifEEvDpT_", "_ZN1aIN1bIS0_S1_EES2_EE", "_ZNK3fooILi5EE3barEv"};
  const char* lanes[] = {"7", "\"stream\"", "8", ""};
  u64 rows = 0, errors = 0;
  const size_t count = (size_t)atoll(argv[2]);
  for (size_t k = 0; k < count; k++) {
    const std::string& base = bases[below(bases.size())];
    size_t from = below(base.size()), size = std::min(base.size() - from, below(3000));
    std::string text = below(3) ? base.substr(0, below(base.size() < 4000 ? base.size() : 4000)) : "[" + base.substr(from, size);
    for (size_t m = below(6); m > 0; m--) {
      size_t at = below(text.size() + 1);
      switch (below(4)) {
        case 0: text.insert(at, tokens[below(sizeof tokens / sizeof *tokens)]); break;
        case 1: text.erase(at, below(40)); break;
        case 2: if (at < text.size()) text[at] = (char)random(); break;
        case 3: text.insert(at, text.substr(below(text.size()), below(200)));
      }
    }
    reader_instructions(widths[below(3)]);
    Reader* r = reader_new(keys, kinds, 6, below(3) ? 1 << 20 : 4);
    std::vector<u8> keep(64);
    std::vector<i32> lane(64);
    std::vector<i64> ids(64);
    for (size_t row = 0; row < 64; row++) keep[row] = (u8)below(3), lane[row] = (i32)below(3) - 1, ids[row] = (i64)below(9) - 1;
    bool copies = below(2), counts = !below(3);
    const char* counted = below(2) ? "n1" : "";
    if (counts && reader_count(r, counted)) abort();
    if (copies)
      reader_copy(r, below(2) ? keep.data() : nullptr, below(2) ? lane.data() : nullptr, below(2) ? ids.data() : nullptr, below(65),
                  lanes, 2, below(2) ? 1500 : 0, ",");
    size_t base_at = 0, chunk = 1 + below(text.size() + 1), filled = 0;
    while (base_at < text.size()) {
      filled = std::min(text.size() - base_at, filled + chunk);
      bool last = base_at + filled == text.size();
      u8* buffer = (u8*)malloc(filled + 64);  // exactly the required size: the sanitizer detects any access beyond it
      memcpy(buffer, text.data() + base_at, filled);
      size_t taken = 0;
      int status = reader_feed(r, buffer, filled, (i64)base_at, last, &taken);
      free(buffer);
      if (taken > filled) abort();
      base_at += taken;
      filled -= taken;
      if (status == BAD) {
        errors++;
        i64 at = reader_number(r, 1);
        if (at < (i64)base_at || at > (i64)text.size()) abort();
        size_t next = text.find('{', (size_t)at + (below(2) ? 1 : 0));
        if (next == std::string::npos) break;
        base_at = next;
        filled = 0;
        reader_resume(r);
      } else if (last) {
        break;
      }
    }
    rows += (u64)reader_number(r, 0);
    const void* at;
    i64 n = reader_number(r, 0);
    const i64* starts;
    i64 size_of_starts = reader_column(r, 0, (const void**)&starts, 0), columns = size_of_starts / 8;
    if (copies || (counts && !*counted) ? columns != 0 : counts ? columns > n : columns != n) abort();
    const i32* tracks;
    reader_column(r, 3, (const void**)&tracks, 0);
    std::vector<i32> parent((size_t)columns);
    if (reader_nest(tracks, starts, starts, (size_t)columns, parent.data())) abort();
    for (int which : {0, 1, 2, 16, 18, 19, 20, 21}) {
      i64 entries, bytes;
      reader_table(r, which, nullptr, nullptr, &entries, &bytes);
      std::vector<u32> lengths((size_t)entries);
      std::vector<u8> content((size_t)bytes);
      reader_table(r, which, lengths.data(), content.data(), &entries, &bytes);
      for (u32 length : lengths) bytes -= length;
      if (bytes) abort();
    }
    std::string mangled = symbols[below(sizeof symbols / sizeof *symbols)];
    for (size_t m = below(4); m > 0; m--) mangled[2 + below(mangled.size() - 2)] = "SNE0123456789_TLKPRfiv"[below(22)];
    std::vector<char> readable(1 + below(300));
    if (reader_demangle(mangled.c_str(), readable.data(), readable.size()) >= (i64)readable.size()) abort();
    for (int c = 0; c < 6; c++)
      if (reader_column(r, 16 + 2 * c, &at, 0) * 2 != reader_column(r, 17 + 2 * c, &at, 0)) abort();
    if (copies) {
      const i64* marks;
      i64 size = reader_column(r, 7, &at, 0), count = reader_column(r, 8, (const void**)&marks, 0) / (i64)sizeof(i64);
      for (i64 k = 0; k < count; k += 3)
        if (marks[k] >= n || marks[k + 1] >= marks[k + 2] || marks[k + 2] > size) abort();
    }
    reader_free(r);
  }
  printf("%zu mutations, %llu rows, %llu errors\n", count, (unsigned long long)rows, (unsigned long long)errors);
}
