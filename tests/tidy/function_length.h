// How many lines each function of a file has.
#ifndef CERTKV_TESTS_TIDY_FUNCTION_LENGTH_H_
#define CERTKV_TESTS_TIDY_FUNCTION_LENGTH_H_

#include <string>
#include <vector>

#include "tests/tidy/source_file.h"

namespace certkv::tidy {

struct FunctionLength {
  std::string name;  // "BlockStore::Seal"; of a test, "TEST_F:BlockStoreTest.SealsOnce"
  int line = 0;      // of the first line of its declaration, counted from 1
  int line_count = 0;
};

// Functions defined at namespace or class level, in order; a function's lambdas count as part of
// it. This is not a parser: it follows braces in code without comments and literals, and takes for
// a function every brace at those levels whose statement has a parenthesis before it.
std::vector<FunctionLength> ListFunctions(const SourceFile& file);

}  // namespace certkv::tidy

#endif  // CERTKV_TESTS_TIDY_FUNCTION_LENGTH_H_
