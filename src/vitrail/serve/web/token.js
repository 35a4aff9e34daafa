// The dialog that asks for the server's token, on both pages.

const $ = (id) => document.getElementById(id);

export function askToken(wrong) {
  return new Promise((resolve) => {
    $("token-note").textContent = wrong ? "That token was not accepted; try another." : "It is kept until this tab is closed.";
    $("token-box").oncancel = (event) => event.preventDefault();
    $("token-form").onsubmit = (event) => { event.preventDefault(); $("token-box").close(); resolve($("token").value); };
    $("token-box").showModal();
  });
}
